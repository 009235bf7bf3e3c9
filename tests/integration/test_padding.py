"""Pairs of one tokenizer with vocabularies padded to different sizes: in every topology the target's own tokens.

Real processes over real sockets. The targets have two sizes; drafts are smaller and larger, and a worker of the pool
that is in between helps both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.request import Grammar, GrammarKind, SamplingParams, Schedule
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import disturbed, tiny_model, tiny_tokenizer
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

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

SMALL, MIDDLE, LARGE = 280, 292, 304
SLOW = ("--emulate", "target:3ms")
"""Passes that a draft worker of the same size can be ahead of."""


def save(directory: Path, size: int, *, is_draft: bool) -> Path:
    """Write one model, or its disturbed twin, padded to a size."""
    model = tiny_model("llama", vocab_size=LARGE, seed=1, max_position_embeddings=2048)
    model = disturbed(model) if is_draft else model
    model.resize_token_embeddings(size)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    packed_decoder(directory, "float32", None)
    return directory


@dataclass(frozen=True)
class Pair:
    """A target, its draft in two topologies, and the ports of these two's metrics."""

    size: int
    target: ServerProcess
    distributed: ServerProcess
    fused: ServerProcess
    metrics_ports: tuple[int, int]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {size: save(root / str(size), size, is_draft=True) for size in (SMALL, MIDDLE, LARGE)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(
    tmp_path_factory: pytest.TempPathFactory, drafts: dict[int, Path]
) -> AsyncGenerator[dict[int, Pair], None]:
    """Yield the pairs by the size of the target; the draft of each has the other size."""
    root = tmp_path_factory.mktemp("targets")
    async with AsyncExitStack() as stack:

        async def pair(size: int, draft: Path) -> Pair:
            model, ports = save(root / str(size), size, is_draft=False), (free_port(), free_port())
            target = await stack.enter_async_context(target_server(model, *SLOW))
            distributed = draft_server(draft, target, "--metrics_port", str(ports[0]))
            servers = distributed, fused_server(model, draft, "--metrics_port", str(ports[1]))
            draft_worker, fused = await asyncio.gather(*map(stack.enter_async_context, servers))
            return Pair(size, target, draft_worker, fused, ports)

        yield {LARGE: await pair(LARGE, drafts[SMALL]), SMALL: await pair(SMALL, drafts[LARGE])}


def requests(size: int) -> list[CompletionRequest]:
    """Return requests of every kind; some name the target's last ids, which a smaller draft lacks."""
    last = tuple((each, 9.0) for each in range(size - 4, size))
    prompt = (5, 17, size - 1, 40, size - 2)
    laws = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=last),
        SamplingParams(logit_bias=last, frequency_penalty=0.2),
    ]
    free = [
        CompletionRequest(words, law, seed=number, max_new_tokens=24, ignore_eos=True, gamma=5, schedule=schedule)
        for number, law in enumerate(laws)
        for words, schedule in ((prompt, Schedule.SYNC), ("the wind", Schedule.ASYNC))
    ]
    grammars = Grammar(GrammarKind.REGEX, r"(the|a)+[0-9]{2,4}(in|ing)*"), Grammar(GrammarKind.CHOICE, '["the end"]')
    bound = [
        CompletionRequest(prompt, law, seed=3, max_new_tokens=24, grammar=grammar, schedule=Schedule.SYNC)
        for law in laws[1:4]
        for grammar in grammars
    ]
    return free + bound


async def alone(pair: Pair, asked: list[CompletionRequest]) -> list[list[int]]:
    completions = await complete_all(pair.target, [replace(request, gamma=0) for request in asked])
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_every_topology_gives_the_targets_tokens(pairs: dict[int, Pair], size: int) -> None:
    pair, asked = pairs[size], requests(size)
    expected = await alone(pair, asked)
    assert any(token_id >= SMALL for token_ids in expected for token_id in token_ids) == (size == LARGE)
    for server in (pair.distributed, pair.fused):
        helped = await complete_all(server, asked)
        assert [completion.token_ids for completion in helped] == expected
        num_drafted = sum(completion.num_draft_tokens for completion in helped)
        assert 0 < sum(completion.num_accepted_tokens for completion in helped) < num_drafted


async def test_the_command_line_learns_the_size(pairs: dict[int, Pair], drafts: dict[int, Path]) -> None:
    """A draft with prompts of its own, without --serve, also names the target's size when it opens a session."""
    target = pairs[LARGE].target
    asked = ("--prompt", "the wind", "--max_new_tokens", "12", "--format", "json")
    draft = ("--role", "draft", "--model", drafts[SMALL], "--port", target.port, "--threads", "1")
    result = await run_command(*map(str, (*draft, *asked)))
    (expected,) = await alone(pairs[LARGE], [CompletionRequest("the wind", max_new_tokens=12)])
    assert result.code == 0, result.stderr
    assert result.objects[0]["token_ids"] == expected


@pytest.mark.parametrize(("size", "share"), [(LARGE, SMALL / LARGE), (SMALL, 1.0)])
async def test_metrics_have_the_size_of_the_drafts_vocabulary(pairs: dict[int, Pair], size: int, share: float) -> None:
    for port in pairs[size].metrics_ports:
        assert await vocabulary_share(port) == pytest.approx(share)


async def test_one_worker_of_the_pool_helps_targets_of_two_sizes(
    pairs: dict[int, Pair], drafts: dict[int, Path]
) -> None:
    """A worker that lacks ids of one target, and has ids that the other refuses, helps both in the same passes."""
    asked = [replace(each, max_new_tokens=60, schedule=None) for size in pairs for each in requests(size)]
    expected = [await alone(pair, asked_of(pair, asked)) for pair in pairs.values()]
    where = ",".join(pair.target.address for pair in pairs.values())
    words = ("--role", "draft", "--model", drafts[MIDDLE], "--threads", "1", *PATIENT, "--attach", where)
    async with command(*words) as worker, asyncio.timeout(60):
        assert worker.stderr is not None
        num_attached = num_accepted = 0
        while num_attached < len(pairs):
            num_attached += b"attached as" in await worker.stderr.readline()
        while num_accepted < 2 * len(asked):
            helped = await asyncio.gather(*(complete_all(p.target, asked_of(p, asked)) for p in pairs.values()))
            assert [[completion.token_ids for completion in each] for each in helped] == expected
            num_accepted += min(sum(each.num_accepted_tokens for each in completions) for completions in helped)
        assert worker.returncode is None


def asked_of(pair: Pair, asked: list[CompletionRequest]) -> list[CompletionRequest]:
    """Return the half of the requests that goes to this target."""
    half = len(asked) // 2
    return asked[:half] if pair.size == LARGE else asked[half:]
