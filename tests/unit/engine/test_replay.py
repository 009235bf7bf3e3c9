"""A failed pass ends only the session that causes it, and a broken engine reports that it is broken."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
import torch
from onnx import TensorProto, helper

from specdec.inference.commit import Commit
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.guard import MAX_FAILED_STEPS
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InternalError, UnavailableError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.model.slots import Array, Span
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.scheduling.pacing import Branching, Pacing
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from tests.support.answers import each_commit, tokens_of
from tests.support.scripted import ScriptedDecoder, tokens_at, until

NUM_TOKENS = 12
GREEDY = SamplingParams()


class BreakingDecoder(ScriptedDecoder):
    """Decoder that raises in each pass for which `breaks` returns an exception."""

    def __init__(self, breaks: Callable[[Sequence[Turn]], Exception | None]) -> None:
        super().__init__(num_slots=8)
        self._breaks = breaks

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        error = self._breaks(turns)
        if error is not None:
            raise error
        return super().step(turns)


async def tokens(engine: TargetEngine, length: int, sampling: SamplingParams = GREEDY) -> list[int]:
    request = GenerationRequest(tuple(range(length)), sampling, max_new_tokens=NUM_TOKENS)
    return await tokens_of(engine.generate(request))


async def test_one_poisonous_session_ends_alone() -> None:
    """If a session makes steps fail, only this session ends.

    Regression: a MemoryError that one large request caused ended eight users' answers with INTERNAL.
    """

    def poison(turns: Sequence[Turn]) -> Exception | None:
        return (
            ValueError("poison")
            if any(turn.token_ids[0] == 0 and len(turn.token_ids) == 106 for turn in turns)
            else None
        )

    async with running(TargetEngine(BreakingDecoder(poison))) as engine:
        lengths = [10, 20, 30, 40, 50, 60, 70]
        asking = [asyncio.create_task(tokens(engine, length)) for length in lengths]
        culprit: list[Commit] = []

        async def ask() -> None:
            async for commit in each_commit(engine.generate(GenerationRequest(tuple(range(100)), max_new_tokens=20))):
                culprit.append(commit)

        with pytest.raises(InternalError, match="failed on this request"):
            await ask()
        assert [token_id for commit in culprit for token_id in commit.token_ids] == tokens_at(100, 6)
        assert [await task for task in asking] == [tokens_at(length, NUM_TOKENS) for length in lengths]
        assert engine.broken is None


class PoisonedProposer:
    """Proposer that is unsure of every token, so that branches begin, and raises if a sequence begins with token 0."""

    num_slots, num_branches, max_length = 4, 2, 100

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        if any(draft.token_ids[0] == 0 and len(draft.token_ids) > 3 for draft in drafts):
            raise ValueError("poison")
        return [[DraftToken(len(draft.token_ids), 50, 0.1)] for draft in drafts]


async def test_a_poisonous_sequence_with_branches_ends_alone_too() -> None:
    """If a session with branches makes steps fail, only this session ends.

    Regression: a step repeated for one suspected session had its branches too, so it was taken for a step of several
    sessions, which broke the engine.
    """
    async with running(DraftEngine(PoisonedProposer())) as engine:
        sound, poisonous = (engine.open([first, 1], GREEDY) for first in (7, 0))
        for session in (sound, poisonous):
            engine.pace(session, Pacing(window=9, min_survival=1e-9, branching=Branching(count=2, depth=2)))
        with pytest.raises(InternalError, match="failed on this request"):
            await poisonous.drafted()
        assert await sound.drafted() == list(range(2, 11))
        assert engine.broken is None


async def test_a_failure_that_passes_is_only_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    decoder = ScriptedDecoder(num_slots=4)
    async with running(TargetEngine(decoder)) as engine:
        decoder.gate.fail(RuntimeError("flicker"), times=1)
        answers = await asyncio.gather(*(tokens(engine, length) for length in (3, 5, 9)))
    assert answers == [tokens_at(length, NUM_TOKENS) for length in (3, 5, 9)]
    assert caplog.text.count("RuntimeError: flicker") == 1


def onnx_runs_out(*, is_arena: bool) -> None:
    """Ask ONNX Runtime for more memory than any machine has: from its arena, or else from the system."""
    size = helper.make_tensor_value_info("size", TensorProto.INT64, [1])
    zeros = helper.make_tensor_value_info("zeros", TensorProto.FLOAT, ["size"])
    graph = helper.make_graph([helper.make_node("ConstantOfShape", ["size"], ["zeros"])], "huge", [size], [zeros])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena, options.log_severity_level = is_arena, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"size": np.array([2**60])})


SHORTAGES: dict[str, Callable[[], object]] = {
    "numpy": partial(np.empty, 2**58),
    "torch": partial(torch.empty, 2**60),
    "onnx": partial(onnx_runs_out, is_arena=True),
    "onnx, without its arena": partial(onnx_runs_out, is_arena=False),
}


@pytest.mark.parametrize("run_out", SHORTAGES.values(), ids=SHORTAGES)
async def test_short_of_memory_halves_the_pass(run_out: Callable[[], object]) -> None:
    """A pass that runs out of memory is repeated in halves.

    Regression: ONNX Runtime and torch report a lack of memory as RuntimeError, so sessions were repeated one
    by one.
    """
    failures: list[int] = []

    def narrow(turns: Sequence[Turn]) -> Exception | None:
        if len(turns) > 4:
            failures.append(len(turns))
            run_out()
        return None

    decoder = BreakingDecoder(narrow)
    async with running(TargetEngine(decoder)) as engine:
        answers = await asyncio.gather(*(tokens(engine, length) for length in range(3, 11)))
    assert answers == [tokens_at(length, NUM_TOKENS) for length in range(3, 11)]
    assert len(failures) <= 2
    assert max(len(turns) for turns in decoder.steps) == 4


async def test_tokens_sampled_on_the_device_are_not_computed_again() -> None:
    decoder = ScriptedDecoder(num_slots=2)
    decoder.seed_invariant = False  # type: ignore[attr-defined]
    async with running(TargetEngine(decoder)) as engine:
        decoder.gate.fail(RuntimeError("flicker"), times=1)
        with pytest.raises(InternalError, match="samples on the device"):
            await tokens(engine, 3, SamplingParams(temperature=1.0))


async def test_steps_that_all_fail_break_the_engine() -> None:
    """An engine whose steps all fail reports that it is broken.

    Regression: a device was lost and every step failed at once, but health stayed SERVING and attracted
    requests.
    """
    decoder = BreakingDecoder(lambda turns: RuntimeError("the device is gone"))
    async with running(TargetEngine(decoder)) as engine:
        failures = 0
        while engine.broken is None:
            with pytest.raises((InternalError, UnavailableError)):
                await tokens(engine, 3)
            failures += 1
        assert failures <= MAX_FAILED_STEPS
        assert engine.fault == engine.broken == f"{MAX_FAILED_STEPS} steps in a row failed"
        with pytest.raises(UnavailableError, match="in a row"):
            await tokens(engine, 3)


async def test_an_engine_with_a_broken_loop_reports_it() -> None:
    """An engine whose loop was ended by an error reports that it is broken.

    Regression: a pass that gave one result too few ended the loop, and every request got the error of a shutdown.
    """

    class Short(ScriptedDecoder):
        def step(self, turns: Sequence[Turn]) -> list[Verdict]:
            return []

    async with running(TargetEngine(Short())) as engine:
        with pytest.raises(UnavailableError, match="the engine broke"):
            await tokens(engine, 3)
        assert engine.broken is not None


async def test_an_endless_pass_delays_no_other_work() -> None:
    """A server with a pass that does not end reports it, and can be stopped.

    Regression: a server with a hung pass reported SERVING for ever, and SIGTERM waited for it on the event
    loop.
    """
    decoder = ScriptedDecoder()
    decoder.gate.close()
    try:
        async with running(TargetEngine(decoder, EngineLimits(pass_timeout_s=0.05))) as engine:
            asking = asyncio.create_task(tokens(engine, 3))
            await until(lambda: engine.fault is not None)
            assert "longer than 0.05 s" in (engine.fault or "")
            began = time.monotonic()
            await engine.stop(grace_s=0.1)
            assert time.monotonic() - began < 5  # the gate alone would hold it for 20
            with pytest.raises(UnavailableError):
                await asking
            assert engine.fault is not None
    finally:
        decoder.gate.open()


class NanBackend:
    """Slot backend whose logits are NaN from some position on."""

    vocab_size, num_slots, max_length, slot_bytes = 32, 4, 64, 0

    def forward(self, spans: Sequence[Span]) -> Array:
        rows = []
        for span in spans:
            end = span.start + len(span.token_ids)
            for position in range(end - span.num_logits, end):
                row = np.zeros(self.vocab_size, np.float32)
                row[position % self.vocab_size] = 9.0
                if position >= 20:
                    row[11] = math.nan
                rows.append(row)
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_invalid_logits_are_never_a_token(temperature: float) -> None:
    """Logits that are not finite are an error, and never give a token.

    Regression: without an error, greedy decoding chose the first NaN and sampling chose token 0, for ever.
    """
    engine = TargetEngine(SlotDecoder(NanBackend()))
    engine.start()
    sampling = SamplingParams(temperature=temperature)
    try:
        healthy = asyncio.create_task(tokens(engine, 3, sampling))
        with pytest.raises(InternalError, match="not finite at position 21"):
            await tokens(engine, 15, sampling)
        assert len(await healthy) == NUM_TOKENS
    finally:
        await engine.stop()
