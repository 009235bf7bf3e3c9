"""Gain from lookup in a target's passes without draft tokens: `python -m benchmarks.gaps [--quick] [--temperature 1]`.

Rows are the target alone at one token a pass; the target with lookup; and a draft that runs ahead of it over links of
several round-trip times, with lookup in the gaps and without. Passes sleep to a least duration, as on an accelerator:
25 ms and 1 ms per draft token for the target, 3 ms for the draft (--pass-ms 0 --slope-ms 0 --step-ms 0 for this
machine's own). The bundled models serve one request at a time. Rows take turns at each, medians over all requests
count, and every row must give the tokens of the first. "By passes" uses the time that passes ought to take, "by CPU"
this process's CPU time: on a busy machine they are the more reliable figures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.decoding import read_prompts
from benchmarks.report import print_json, print_table
from comparison.run.proxy import LinkConditions, delay_proxy
from grpc_comm.server import Server
from inference.backends.registry import asleep, load_backend
from inference.commit import Delta
from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    DEFAULT_BRANCHES,
    ROOT,
    ConnectionConfig,
    DraftConfig,
    ModelConfig,
)
from inference.engine.pool import DraftPool
from inference.engine.target import EngineLimits, TargetEngine
from inference.model.slots import Span
from inference.observe.metrics import Metrics
from inference.observe.stats import SOURCES, RequestStats
from inference.request import SamplingParams
from inference.serving.assembly import LoadedDraft, draft_worker, running
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.text.tokenizer import Tokenizer
from inference.text.vocabulary import Vocabulary
from inference.workers.completion import Completer, CompletionRequest, ModelCard
from inference.workers.fleet import Fleet
from inference.workers.local import LocalCompleter
from inference.workers.observer import Observer
from inference.workers.status import to_status
from inference.workers.target.verification import VerificationServicer

KINDS = ("structured", "open_ended")
MAX_LENGTH = 512


@dataclass
class PassTime:
    """Least seconds of a pass, and the seconds that all passes so far ought to have taken."""

    pass_s: float
    slope_s: float = 0.0
    due_s: float = 0.0

    def __call__(self, spans: Sequence[Span]) -> float:
        """Return `pass_s`, and `slope_s` more for each token of a span beyond its first."""
        seconds = self.pass_s + self.slope_s * sum(len(span.token_ids) - 1 for span in spans)
        self.due_s += seconds
        return seconds


@dataclass
class Row:
    """Way to serve, and its figures."""

    completer: Completer
    target: PassTime
    gamma: int | None = None
    due_s: float = 0.0
    cpu_s: float = 0.0
    rates: list[float] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)

    def of_source(self, source: str) -> tuple[int, int]:
        """Return the numbers of draft tokens verified and accepted."""
        num_accepted = sum(stats.by_source[source, True] for stats in self.stats)
        return num_accepted + sum(stats.by_source[source, False] for stats in self.stats), num_accepted


def main() -> None:
    args = _parser().parse_args()
    found = {kind: asyncio.run(_measure(args, kind)) for kind in KINDS}
    for kind, rows in found.items():
        _print(kind, rows)
    print_json("gaps", {kind: {name: _json(row) for name, row in rows.items()} for kind, rows in found.items()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gaps", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of two prompts")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="of a request (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    parser.add_argument("--pass-ms", type=float, default=25.0, help="least duration of a target pass (%(default)s)")
    parser.add_argument("--slope-ms", type=float, default=1.0, help="added duration per draft token (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=3.0, help="least duration of a draft step (%(default)s)")
    parser.add_argument("--rtt-ms", default="80,150", help="round trips to a draft; none for no draft (%(default)s)")
    return parser


async def _measure(args: argparse.Namespace, kind: str) -> dict[str, Row]:
    num_prompts, rounds = (2, 1) if args.quick else (args.prompts, args.rounds)
    sampling = SamplingParams(temperature=args.temperature)
    requests = [
        CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=args.tokens, ignore_eos=True)
        for seed, prompt in enumerate(read_prompts(ROOT / "prompts" / f"{kind}.txt", num_prompts))
    ]
    async with _rows(args) as rows:
        expected = [await _tokens(rows["plain"], request) for request in requests]
        for row in rows.values():
            await _tokens(row, requests[0])
            row.stats.clear()
        for _ in range(rounds):
            for request, truth in zip(requests, expected, strict=True):
                for name, row in rows.items():
                    started, cpu_s, due_s = time.perf_counter(), time.process_time(), row.target.due_s
                    if await _tokens(row, request) != truth:
                        raise SystemExit(f"{name}: other tokens than plain decoding")
                    row.due_s += row.target.due_s - due_s
                    row.cpu_s += time.process_time() - cpu_s
                    row.rates.append(len(truth) / (time.perf_counter() - started))
        return rows


async def _tokens(row: Row, request: CompletionRequest) -> list[int]:
    token_ids: list[int] = []
    row.stats.append(RequestStats())
    async for event in row.completer.complete(replace(request, gamma=row.gamma)):
        row.stats[-1].take(event)
        if isinstance(event, Delta):
            token_ids += event.token_ids
    return token_ids


@asynccontextmanager
async def _rows(args: argparse.Namespace) -> AsyncGenerator[dict[str, Row], None]:
    """Yield every way to serve, plain decoding first."""
    rows: dict[str, Row] = {}
    async with AsyncExitStack() as stack:
        tokenizer = Tokenizer.load(BUNDLED_TARGET)
        for name, lookup in (("", False), (", lookup", True)):
            engine, target, server = await stack.enter_async_context(_target(args, lookup=lookup))
            row = Row(LocalCompleter(engine, tokenizer), target, None if lookup else 0)
            rows["target alone, lookup" if lookup else "plain"] = row
            for rtt in args.rtt_ms.split(",") if args.rtt_ms != "none" else ():
                draft = _draft(tokenizer, args.step_ms / 1e3, float(rtt) / 1e3, server)
                rows[f"async, {rtt} ms{name}"] = Row(await stack.enter_async_context(draft), target)
        yield rows


def _model(path: Path, num_slots: int, pass_time: PassTime) -> Any:
    config = ModelConfig(
        path, backend="onnx", device="cpu", num_slots=num_slots, sequence_length=MAX_LENGTH, num_threads=1
    )
    return asleep(load_backend(config), pass_time)


@asynccontextmanager
async def _target(
    args: argparse.Namespace, *, lookup: bool
) -> AsyncGenerator[tuple[TargetEngine, PassTime, Server], None]:
    """Yield an engine, its pass time, and a server of this process in front of it."""
    tokenizer, pass_time = Tokenizer.load(BUNDLED_TARGET), PassTime(args.pass_ms / 1e3, args.slope_ms / 1e3)
    backend = _model(BUNDLED_TARGET, 2, pass_time)
    async with running(TargetEngine(SlotDecoder(backend), EngineLimits(lookup=lookup))) as engine:
        card = ModelCard("target", "target", engine.max_length, backend.vocab_size, tokenizer.fingerprint)
        observer = Observer(Metrics("target"))
        verifier = VerificationServicer(engine, DraftPool(engine), card, idle_timeout_s=60.0, observer=observer)
        server = Server("127.0.0.1:0", [verifier], status_of=to_status)
        await server.open()
        try:
            yield engine, pass_time, server
        finally:
            await engine.stop()
            await server.close()


@asynccontextmanager
async def _draft(tokenizer: Tokenizer, step_s: float, rtt_s: float, target: Server) -> AsyncGenerator[Completer, None]:
    """Yield a draft worker with a slow link to the target."""
    backend = _model(BUNDLED_DRAFT, 1 + DEFAULT_BRANCHES, PassTime(step_s))
    proposer = ModelProposer(backend, num_branches=DEFAULT_BRANCHES)
    loaded = LoadedDraft(proposer, tokenizer, Vocabulary(tokenizer.fingerprint, backend.vocab_size))
    async with (
        delay_proxy(target.port, LinkConditions(rtt_s=rtt_s)) as link,
        Fleet([link.address]) as fleet,
        draft_worker(loaded, DraftConfig(ConnectionConfig("127.0.0.1", link.port)), fleet) as (worker, _),
    ):
        yield LocalCompleter(worker, tokenizer)


def _print(kind: str, rows: dict[str, Row]) -> None:
    header = ["", "tokens/s", "/ plain", "quartiles", "by passes", "by CPU", "tokens/pass"]
    body = []
    for name, row in rows.items():
        ratios = [rate / plain for rate, plain in zip(row.rates, rows["plain"].rates, strict=True)]
        low, middle, high = statistics.quantiles(ratios)
        body.append(
            [
                name,
                f"{statistics.median(row.rates):.1f}",
                f"{middle:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{_by_passes(row) / _by_passes(rows['plain']):.2f}",
                f"{rows['plain'].cpu_s / row.cpu_s:.2f}",
                f"{_tokens_per_pass(row):.2f}",
                *("{1} of {0}".format(*row.of_source(source)) for source in SOURCES),
            ]
        )
    print_table(f"{kind} prompts", [*header, *(f"accepted: {source}" for source in SOURCES)], body)


def _tokens_per_pass(row: Row) -> float:
    return sum(stats.num_output_tokens for stats in row.stats) / sum(len(stats.arrivals) for stats in row.stats)


def _by_passes(row: Row) -> float:
    return sum(stats.num_output_tokens for stats in row.stats) / row.due_s if row.due_s else 1.0


def _json(row: Row) -> dict[str, Any]:
    sources = {source: row.of_source(source) for source in SOURCES}
    return {
        "tokens_per_s": row.rates,
        "by_passes": _by_passes(row),
        "tokens_per_pass": _tokens_per_pass(row),
        "sources": sources,
    }


if __name__ == "__main__":
    main()
