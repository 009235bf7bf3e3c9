"""Tests that drafts with another vocabulary than their target's change none of the target's tokens, in any topology.

Real processes over real sockets. A draft has its target's tokenizer and is padded to another size; or it is a copy of
the target with changed weights, and has another tokenizer, in SentencePiece's spelling and without some of the merges.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.comparison.run.proxy import delay_proxy
from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.config import ConnectionConfig
from specdec.inference.request import Grammar, GrammarKind, SamplingParams, Schedule
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import NUM_TOKENIZER_IDS, disturbed, tiny_model, tiny_tokenizer
from tests.support.servers import (
    complete_all,
    cut_for,
    draft_server,
    fused_server,
    interrupted,
    pool_worker,
    target_server,
    vocabulary_share,
)
from tests.support.tokenizers import foreign

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

SMALL, MIDDLE, LARGE = 280, 292, 304
SLOW = ("--emulate", "target:3ms")
"""Flags that slow the target's passes, so that a draft worker of the same size can run ahead of them."""
LAST = 267
"""Last token id of the other tokenizer; the target has more tokens, each of which is several of the draft's."""


@dataclass(frozen=True)
class Kind:
    """One case of these tests: vocabulary sizes of four models; None stands for another tokenizer than the target's.

    Attributes:
        target: vocabulary size of the target.
        draft: that of the target's draft model, used by a draft server and in a server with both models.
        helper: that of a draft worker's model, which drafts for both `target` and the target `other`.
        other: that of a second target.
        wanted: logit biases of some requests, by token id, so that these tokens come.
        shares: least and greatest share of the target's token ids that the draft may be able to propose.
    """

    target: int
    draft: int | None
    helper: int | None
    other: int | None
    wanted: dict[int, float]
    shares: tuple[float, float]


def last_ids(size: int) -> dict[int, float]:
    return dict.fromkeys(range(size - 4, size), 9.0)


FOREIGN = Kind(NUM_TOKENIZER_IDS, None, None, None, {20: 4.0, LAST: 4.0}, (0.5, 0.999))
FEWER = Kind(LARGE, SMALL, MIDDLE, SMALL, last_ids(LARGE), (0.92, 0.93))
MORE = Kind(SMALL, LARGE, MIDDLE, LARGE, last_ids(SMALL), (1.0, 1.0))


@pytest.fixture(
    scope="module", params=[FOREIGN, *(pytest.param(other, marks=pytest.mark.release) for other in (FEWER, MORE))]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


of_another_tokenizer = pytest.mark.parametrize("kind", [FOREIGN], indirect=True)


@pytest.fixture(scope="module")
def models(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the four models of a case; return their directories by the names of the fields of `Kind`."""
    root = tmp_path_factory.mktemp("models")
    for name in ("target", "draft", "helper", "other"):
        size = getattr(kind, name)
        model = tiny_model("llama", vocab_size=LARGE, seed=1, max_position_embeddings=2048)
        model = model if name in ("target", "other") else disturbed(model)
        model.resize_token_embeddings(size or NUM_TOKENIZER_IDS)
        if size is None:
            foreign(tiny_tokenizer(), "sentencepiece", num_removed=4).save(root / name, model)
        else:
            model.save_pretrained(root / name)
            tiny_tokenizer().save_pretrained(root / name)
        packed_decoder(root / name, "float32", None)
    return {directory.name: directory for directory in root.iterdir()}


@dataclass(frozen=True)
class Servers:
    """A target, a draft server for it, a server with both models, and the metrics ports of the latter two."""

    target: ServerProcess
    distributed: ServerProcess
    fused: ServerProcess
    metrics_ports: tuple[int, int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(models: dict[str, Path], tokenizer: tuple[str, ...]) -> AsyncGenerator[Servers, None]:
    ports = free_port(), free_port()
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server(models["target"], *SLOW))
        edge = draft_server(models["draft"], target, *tokenizer, "--metrics_port", str(ports[0]))
        fused = fused_server(models["target"], models["draft"], "--metrics_port", str(ports[1]))
        draft_worker, pair = await asyncio.gather(*map(stack.enter_async_context, (edge, fused)))
        yield Servers(target, draft_worker, pair, ports)


@pytest.fixture(scope="module")
def tokenizer(kind: Kind, models: dict[str, Path]) -> tuple[str, ...]:
    """Return flags by which a draft server uses its target's tokenizer to read prompts.

    There are none if the draft's own tokenizer is the same.
    """
    return () if kind.draft else ("--tokenizer", str(models["target"]))


def requests(kind: Kind) -> list[CompletionRequest]:
    """Return requests with various sampling parameters and grammars, with prompts as token ids and as text.

    For some the target waits for each proposal of the draft; for others the draft runs ahead.
    """
    bias = tuple(kind.wanted.items())
    laws = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=bias),
        SamplingParams(logit_bias=bias, frequency_penalty=0.2),
    ]
    free = [
        CompletionRequest(words, law, seed=n, max_new_tokens=24, ignore_eos=True, gamma=5, schedule=schedule, stop=stop)
        for n, law in enumerate(laws)
        for words, schedule, stop in (
            ((0, 5, 17, max(kind.wanted), 40), Schedule.SYNC, ()),
            ("the wind é日 ", Schedule.ASYNC, ("e", "zz")),
        )
    ]
    grammars = Grammar(GrammarKind.REGEX, r"(the|a)+[0-9]{2,4}(in|ing)*"), Grammar(GrammarKind.CHOICE, '["the end"]')
    bound = [
        CompletionRequest("the", law, seed=3, max_new_tokens=24, grammar=grammar, schedule=Schedule.SYNC)
        for law in laws[1:4]
        for grammar in grammars
    ]
    return free + bound


async def alone(target: ServerProcess, asked: list[CompletionRequest]) -> list[list[int]]:
    return [each.token_ids for each in await complete_all(target, [replace(each, gamma=0) for each in asked])]


async def test_every_topology_gives_the_targets_tokens(kind: Kind, servers: Servers) -> None:
    expected = await alone(servers.target, requests(kind))
    draft_ends = LAST + 1 if kind.draft is None else kind.draft
    assert max(map(max, expected)) >= draft_ends or kind is MORE
    for server in (servers.distributed, servers.fused):
        helped = await complete_all(server, requests(kind))
        assert [completion.token_ids for completion in helped] == expected
        num_drafted = sum(completion.num_draft_tokens for completion in helped)
        assert 0.05 * num_drafted < sum(completion.num_accepted_tokens for completion in helped) < num_drafted


async def test_metrics_show_what_the_draft_can_propose(kind: Kind, servers: Servers) -> None:
    least, most = kind.shares
    for port in servers.metrics_ports:
        assert least <= await vocabulary_share(port) <= most


@pytest.mark.parametrize("kind", [FOREIGN, pytest.param(FEWER, marks=pytest.mark.release)], indirect=True)
async def test_one_worker_of_the_pool_helps_two_targets(kind: Kind, servers: Servers, models: dict[str, Path]) -> None:
    """One draft worker drafts for two targets with different vocabularies at once, and changes no token of either."""
    async with target_server(models["other"], *SLOW) as other:
        asked = {servers.target: requests(kind), other: requests(kind if kind is FOREIGN else MORE)}
        expected = [await alone(target, each) for target, each in asked.items()]
        open_ended = {target: [replace(it, schedule=None) for it in each] for target, each in asked.items()}
        num_accepted = 0
        async with pool_worker(models["helper"], servers.target.address, other.address) as worker, asyncio.timeout(60):
            while num_accepted < len(requests(kind)):
                helped = await asyncio.gather(*(complete_all(target, each) for target, each in open_ended.items()))
                assert [[completion.token_ids for completion in each] for each in helped] == expected
                num_accepted += min(sum(each.num_accepted_tokens for each in completions) for completions in helped)
            assert worker.returncode is None


LAW = SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((20, 4.0), (LAST, 4.0)))
LONG = CompletionRequest("the wind", LAW, seed=3, max_new_tokens=300, ignore_eos=True)


@of_another_tokenizer
async def test_a_draft_whose_link_is_cut_resumes(
    servers: Servers, models: dict[str, Path], tokenizer: tuple[str, ...]
) -> None:
    async with delay_proxy(servers.target.port) as link:
        near = replace(servers.target, address=link.address)
        async with draft_server(models["draft"], near, *tokenizer) as server:
            cut = await interrupted(server, LONG, {100: cut_for(link, 0.2)})
    assert [cut.token_ids] == await alone(servers.target, [LONG])


@of_another_tokenizer
async def test_an_answer_goes_on_at_the_target_when_the_pair_dies(servers: Servers) -> None:
    """When the server with both models dies, its answer goes on at the target, with the same tokens.

    The test is the last one, since it ends that server.
    """
    connection = ConnectionConfig(f"{servers.fused.address},{servers.target.address}", 1)
    async with connected(connection) as fleet:
        cut = await interrupted(FailoverCompleter(fleet, connection), LONG, {50: servers.fused.process.kill})
    assert [cut.token_ids] == await alone(servers.target, [LONG])
