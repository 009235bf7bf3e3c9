"""Shares of the causes in the time of a request whose draft runs ahead: `python -m benchmarks.run_ahead`.

Engines, models, pacing and messages are the real ones, on a clock of their own (benchmarks/virtual_time.py): a pass
takes just the given time, and a message half a round trip and --hop-ms. So the figures are the same on any machine.
The columns are shares of the time from the request to its last token. Further rows change one thing each: what they
gain is what it costs. All rows must give the target's own tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.decoding import GREEDY, decode, encode_all, load_model, read_prompts
from benchmarks.gaps import KINDS, MAX_LENGTH, PassTime
from benchmarks.report import print_json, print_table
from benchmarks.virtual_time import run_in_virtual_time
from inference.backends.registry import asleep, load_backend
from inference.commit import Commit
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_BRANCHES, DEFAULT_GAMMA, ROOT, ModelConfig
from inference.engine.draft import DraftEngine
from inference.engine.pool import DraftPool
from inference.engine.target import EngineLimits, TargetEngine
from inference.model.proposer import Draft, DraftToken
from inference.observe.metrics import Metrics
from inference.request import UNKNOWN, GenerationRequest, Schedule
from inference.scheduling.link import Link
from inference.serving.assembly import running
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.text.tokenizer import Tokenizer
from inference.text.vocabulary import Vocabulary
from inference.workers.completion import ModelCard
from inference.workers.draft.schedules import run_ahead
from inference.workers.draft.verify_stream import StreamState, VerifyStream
from inference.workers.observer import Observer
from inference.workers.target.verification import VerificationServicer

CAUSES = ("messages at both ends", "prompt", "with draft", "alone after a rejection", "alone otherwise", "waits")
_LATER_S = 3.0
"""Seconds between two requests, in which the target gives up a finished stream."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Times in seconds and what else a row may change.

    Attributes:
        hop_s: seconds of a message besides half the round trip.
        is_right: whether the draft is always right.
    """

    rtt_s: float
    pass_s: float
    slope_s: float
    step_s: float
    hop_s: float
    branches: int = DEFAULT_BRANCHES
    is_right: bool = False


@dataclass
class Passes:
    """Spans of the target's passes; takes the place of its `Timeline`."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def span(self, _: str, started: float, ended: float, **attributes: Any) -> None:
        self.spans.append((started, ended))


class _Way:
    """One direction of a stream; a message takes `delay_s`, and messages keep their order."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._last_s = 0.0

    def put(self, message: object) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(loop.time() + self._delay_s, self._last_s + 1e-7)
        loop.call_at(self._last_s, self._messages.put_nowait, message)

    async def get(self) -> Any:
        return await self._messages.get()


@dataclass
class _Call:
    """One end of a stream, in the place of gRPC's."""

    reads: _Way
    writes: _Way
    deadline: None = None

    async def read(self) -> Any:
        return await self.reads.get()

    async def write(self, message: object) -> None:
        self.writes.put(message)


class _Right:
    """A proposer that knows the answer."""

    num_slots, num_branches, max_length = 1, 0, MAX_LENGTH

    def __init__(self, pass_time: PassTime) -> None:
        self._pass_time = pass_time
        self.answer: Sequence[int] = ()

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        time.sleep(self._pass_time.pass_s)
        return [[DraftToken(self.answer[min(len(draft.token_ids), len(self.answer) - 1)], 0, 20.0)] for draft in drafts]


@dataclass
class Pair:
    """Draft and target of one row."""

    setting: Setting
    draft: DraftEngine
    verifier: VerificationServicer
    passes: Passes
    vocabulary: Vocabulary
    right: _Right
    link: Link = field(default_factory=Link)

    async def complete(self, request: GenerationRequest) -> tuple[list[Commit], dict[str, float]]:
        """Return the commits of a request, and its seconds by cause."""
        setting = self.setting
        up, down = (_Way(setting.rtt_s / 2 + setting.hop_s) for _ in range(2))
        self.passes.spans.clear()
        began = time.monotonic()
        session = self.draft.open(request.prompt_token_ids, request.sampling, vocab_size=self.vocabulary.size)
        await session.admitted()
        call: Any = _Call(up, down)
        serving = asyncio.create_task(self.verifier.Verify(None, call))
        self.link = Link(self.link)
        stream_call: Any = _Call(down, up)
        stream = VerifyStream(stream_call, "target", StreamState(UNKNOWN, session), self.link)
        await stream.open(request, self.vocabulary)
        commits = [each async for each in run_ahead(self.draft, session, stream, gamma=request.gamma or 0)]
        ended = time.monotonic()
        self.draft.close(session)
        await asyncio.sleep(_LATER_S)
        await serving
        return commits, _by_cause(began, ended, self.passes.spans, commits)


def _by_cause(
    began: float, ended: float, spans: Sequence[tuple[float, float]], commits: Sequence[Commit]
) -> dict[str, float]:
    seconds = dict.fromkeys(CAUSES, 0.0)
    seconds["messages at both ends"] = spans[0][0] - began + ended - spans[-1][1]
    seconds["prompt"] = spans[0][1] - spans[0][0]
    is_rejected = False
    for (_, before), (start, end), commit in zip(spans, spans[1:], commits[1:], strict=False):
        seconds["waits"] += start - before
        if commit.num_draft_tokens > commit.own.num_tokens:
            seconds["with draft"] += end - start
            is_rejected = commit.num_accepted_tokens < commit.num_draft_tokens
        else:
            seconds["alone after a rejection" if is_rejected else "alone otherwise"] += end - start
    return seconds


@asynccontextmanager
async def _pair(setting: Setting) -> AsyncGenerator[Pair, None]:
    tokenizer = Tokenizer.load(BUNDLED_TARGET)
    target = asleep(_backend(BUNDLED_TARGET, 2), PassTime(setting.pass_s, setting.slope_s))
    right = _Right(PassTime(setting.step_s))
    draft = asleep(_backend(BUNDLED_DRAFT, 1 + setting.branches), PassTime(setting.step_s))
    proposer = right if setting.is_right else ModelProposer(draft, num_branches=setting.branches)
    passes: Any = Passes()
    async with (
        running(TargetEngine(SlotDecoder(target), EngineLimits(prefix_caching=False))) as engine,
        running(DraftEngine(proposer, prefix_caching=False)) as drafting,
    ):
        engine.timeline = passes
        card = ModelCard("target", "target", engine.max_length, target.vocab_size, tokenizer.fingerprint)
        observer = Observer(Metrics("target"))
        verifier = VerificationServicer(engine, DraftPool(engine), card, idle_timeout_s=60.0, observer=observer)
        vocabulary = Vocabulary(tokenizer.fingerprint, target.vocab_size)
        yield Pair(setting, drafting, verifier, passes, vocabulary, right)


def _backend(path: Any, num_slots: int) -> Any:
    config = ModelConfig(
        path, backend="onnx", device="cpu", num_slots=num_slots, sequence_length=MAX_LENGTH, num_threads=1
    )
    return load_backend(config)


async def measure(setting: Setting, requests: Sequence[GenerationRequest], truths: Sequence[Sequence[int]]) -> Any:
    """Return tokens per second and shares of time by cause, after one request that does not count."""
    totals, num_tokens = dict.fromkeys(CAUSES, 0.0), 0
    async with _pair(setting) as pair:
        for number, (request, truth) in enumerate([(requests[0], truths[0]), *zip(requests, truths, strict=True)]):
            pair.right.answer = [*request.prompt_token_ids, *truth]
            commits, seconds = await pair.complete(request)
            if [token_id for commit in commits for token_id in commit.token_ids] != list(truth):
                raise SystemExit(f"{setting}: other tokens than plain decoding")
            if number:
                num_tokens += len(truth)
                totals = {cause: totals[cause] + seconds[cause] for cause in CAUSES}
    total_s = sum(totals.values())
    return {"tokens_per_s": num_tokens / total_s, **{cause: totals[cause] / total_s for cause in CAUSES}}


def main() -> None:
    args = _parser().parse_args()
    setting = Setting(0.0, args.pass_ms / 1e3, args.slope_ms / 1e3, args.step_ms / 1e3, args.hop_ms / 1e3)
    found = {}
    for kind in KINDS:
        prompts = encode_all(read_prompts(ROOT / "prompts" / f"{kind}.txt", args.prompts), BUNDLED_TARGET)
        decoder = SlotDecoder(load_model(BUNDLED_TARGET, backend="onnx", threads=1))
        truths = [decode(decoder, prompt, gamma=0, num_tokens=args.tokens)[0] for prompt in prompts]
        requests = [
            GenerationRequest(tuple(prompt), GREEDY, args.tokens, gamma=DEFAULT_GAMMA, schedule=Schedule.ASYNC)
            for prompt in prompts
        ]
        for rtt in args.rtt_ms.split(","):
            at = replace(setting, rtt_s=float(rtt) / 1e3)
            rows = {"as it is": at, "draft always right": replace(at, is_right=True), "no hops": replace(at, hop_s=0.0)}
            rows |= {f"{number} branches": replace(at, branches=number) for number in (0, 8)}
            found[f"{kind}, {rtt} ms"] = {
                name: run_in_virtual_time(measure(row, requests, truths)) for name, row in rows.items()
            }
    for title, figures in found.items():
        body = [
            [name, f"{row['tokens_per_s']:.1f}", *(f"{100 * row[cause]:.0f} %" for cause in CAUSES)]
            for name, row in figures.items()
        ]
        print_table(title, ["", "tokens/s", *CAUSES], body)
    print_json("run_ahead", found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_ahead", description=__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of a request (%(default)s)")
    parser.add_argument("--rtt-ms", default="0,30,80", help="round trips (%(default)s)")
    parser.add_argument("--pass-ms", type=float, default=25.0, help="duration of a target pass (%(default)s)")
    parser.add_argument("--slope-ms", type=float, default=0.0, help="added duration per draft token (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=3.0, help="duration of a draft step (%(default)s)")
    parser.add_argument("--hop-ms", type=float, default=0.4, help="of a message besides the network (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
