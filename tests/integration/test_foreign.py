"""A draft with another tokenizer than its target's: in every topology the target's own tokens.

Real processes over real sockets. The draft is the target's twin, disturbed, with a vocabulary in SentencePiece's
spelling that lacks some of the merges; a worker of the pool helps a second target too, whose tokenizer it shares.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from specdec.comparison.run.proxy import delay_proxy
from specdec.grpc_comm.channel import open_channel
from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.commit import Delta
from specdec.inference.config import ConnectionConfig
from specdec.inference.request import Grammar, GrammarKind, SamplingParams, Schedule
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import NUM_TOKENIZER_IDS, disturbed, tiny_model, tiny_tokenizer
from tests.support.servers import (
    PATIENT,
    command,
    complete_all,
    draft_server,
    fused_server,
    run_command,
    target_server,
    vocabulary_share,
)
from tests.support.tokenizers import foreign

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SLOW = ("--emulate", "target:3ms")
"""Passes that a draft worker of the same size can be ahead of."""
LAST = 267
"""Last id of the draft, and of the second target; the first target has more, which the draft must spell."""
LAW = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((20, 4.0), (LAST, 4.0)))
LONG = CompletionRequest("the wind", LAW, seed=3, max_new_tokens=300, ignore_eos=True)


@dataclass(frozen=True)
class Models:
    """Directories: a target, a draft with another tokenizer, and a second target with that tokenizer."""

    target: Path
    draft: Path
    other: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root, theirs = tmp_path_factory.mktemp("models"), foreign(tiny_tokenizer(), "sentencepiece", num_removed=4)

    def model() -> PreTrainedModel:
        return tiny_model("llama", vocab_size=NUM_TOKENIZER_IDS, seed=1, max_position_embeddings=2048)

    model().save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    draft, other = theirs.save(root / "draft", disturbed(model())), theirs.save(root / "other", model())
    for directory in (root / "target", draft, other):
        packed_decoder(directory, "float32", None)
    return Models(root / "target", draft, other)


@dataclass(frozen=True)
class Servers:
    """Servers of one target, and the ports of the metrics of the two with a draft."""

    target: ServerProcess
    distributed: ServerProcess
    fused: ServerProcess
    metrics_ports: tuple[int, int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(models: Models) -> AsyncGenerator[Servers, None]:
    ports = free_port(), free_port()
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server(models.target, *SLOW))
        edge = draft_server(models.draft, target, "--tokenizer", str(models.target), "--metrics_port", str(ports[0]))
        fused = fused_server(models.target, models.draft, "--metrics_port", str(ports[1]))
        draft_worker, pair = await asyncio.gather(*map(stack.enter_async_context, (edge, fused)))
        yield Servers(target, draft_worker, pair, ports)


def requests() -> list[CompletionRequest]:
    """Return requests of every kind."""
    laws = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2),
        LAW,
    ]
    free = [
        CompletionRequest(words, law, seed=n, max_new_tokens=24, ignore_eos=True, gamma=5, schedule=schedule, stop=stop)
        for n, law in enumerate(laws)
        for words, schedule, stop in (
            ((0, 5, 17, LAST, 40), Schedule.SYNC, ()),
            ("the wind é日 ", Schedule.ASYNC, ("e", "zz")),
        )
    ]
    grammars = Grammar(GrammarKind.REGEX, r"(the|a)+[0-9]{2,4}(in|ing)*"), Grammar(GrammarKind.CHOICE, '["the end"]')
    bound = [
        CompletionRequest("the", law, seed=3, max_new_tokens=24, grammar=grammar, schedule=Schedule.SYNC)
        for law in laws[1:]
        for grammar in grammars
    ]
    return free + bound


async def alone(target: ServerProcess) -> list[list[int]]:
    return [each.token_ids for each in await complete_all(target, [replace(each, gamma=0) for each in requests()])]


async def test_every_topology_gives_the_targets_tokens(servers: Servers) -> None:
    expected = await alone(servers.target)
    assert max(map(max, expected)) > LAST
    for server in (servers.distributed, servers.fused):
        helped = await complete_all(server, requests())
        assert [completion.token_ids for completion in helped] == expected
        num_drafted = sum(completion.num_draft_tokens for completion in helped)
        assert 0.05 * num_drafted < sum(completion.num_accepted_tokens for completion in helped) < num_drafted


async def test_the_command_line_takes_the_targets_tokenizer(servers: Servers, models: Models) -> None:
    """A draft without --tokenizer is refused, and the message names the flag."""
    asked = ("--prompt", "the wind", "--max_new_tokens", "12", "--format", "json", "--threads", "1")
    draft = ("--role", "draft", "--model", str(models.draft), "--port", str(servers.target.port), *asked)
    result = await run_command(*draft, "--tokenizer", str(models.target))
    (expected,) = await complete_all(servers.target, [CompletionRequest("the wind", max_new_tokens=12)])
    assert result.code == 0, result.stderr
    assert result.objects[0]["token_ids"] == expected.token_ids
    refused = await run_command(*draft)
    assert refused.code != 0
    assert "--tokenizer" in refused.stderr


async def test_a_draft_with_too_few_of_the_targets_tokens_is_refused(models: Models) -> None:
    pair = ("--role", "verify_fused", "--target_model", str(models.target), "--draft_model", str(models.draft))
    refused = await run_command(*pair, "--prompt", "the", "--min_vocabulary_share", "1")
    assert refused.code != 0
    assert re.search(r"\d+ of the target's 272 tokens .*--min_vocabulary_share 1", refused.stderr)


async def test_metrics_show_what_the_draft_can_propose(servers: Servers) -> None:
    for port in servers.metrics_ports:
        assert 0.5 < await vocabulary_share(port) < 1.0


async def test_one_worker_of_the_pool_helps_targets_of_two_tokenizers(servers: Servers, models: Models) -> None:
    """A worker gets one target's tokenizer from that target; sessions of both targets meet in its passes."""
    async with target_server(models.other, *SLOW) as other, AsyncExitStack() as stack:
        targets = servers.target, other
        expected = [await alone(target) for target in targets]
        where = ",".join(target.address for target in targets)
        words = ("--role", "draft", "--model", models.draft, "--threads", "1", *PATIENT, "--attach", where)
        worker = await stack.enter_async_context(command(*map(str, words)))
        asked = [replace(each, schedule=None) for each in requests()]
        num_accepted = 0
        async with asyncio.timeout(60):
            while num_accepted < len(asked):
                helped = await asyncio.gather(*(complete_all(target, asked) for target in targets))
                assert [[completion.token_ids for completion in each] for each in helped] == expected
                num_accepted += min(sum(each.num_accepted_tokens for each in completions) for completions in helped)
        assert worker.returncode is None


async def test_a_draft_whose_link_is_cut_resumes(servers: Servers, models: Models) -> None:
    (expected,) = await complete_all(servers.target, [replace(LONG, gamma=0)])
    was_cut = False
    async with delay_proxy(servers.target.port) as link:
        near = replace(servers.target, address=link.address)
        async with draft_server(models.draft, near, "--tokenizer", str(models.target)) as server:
            token_ids: list[int] = []
            async with open_channel(server.address) as channel:
                async for event in RemoteCompleter(channel, server.address, deadline_s=60.0).complete(LONG):
                    token_ids += event.token_ids if isinstance(event, Delta) else ()
                    if len(token_ids) > 100 and not was_cut:
                        was_cut = True
                        link.cut()
                        asyncio.get_running_loop().call_later(0.2, link.restore)
    assert was_cut
    assert token_ids == expected.token_ids


async def test_an_answer_goes_on_at_the_target_when_the_pair_dies(servers: Servers) -> None:
    """The fused server ends here, so this test is the last one."""
    (expected,) = await complete_all(servers.target, [replace(LONG, gamma=0)])
    connection = ConnectionConfig(f"{servers.fused.address},{servers.target.address}", 1, 60.0)
    async with connected(connection) as fleet:
        token_ids: list[int] = []
        async with aclosing(FailoverCompleter(fleet, connection).complete(LONG)) as events:
            async for event in events:
                token_ids += event.token_ids if isinstance(event, Delta) else ()
                if len(token_ids) > 50 and servers.fused.process.returncode is None:
                    servers.fused.process.kill()
                    await servers.fused.process.wait()
    assert token_ids == expected.token_ids
