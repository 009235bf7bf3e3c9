"""JSON extraction with a grammar and without, on each topology: `python -m benchmarks.structured [--quick]`.

Requests run one at a time with the bundled models: a target process, and the draft in this one. Plain is the target
alone at one token a pass; every other row must give its tokens, or the benchmark ends. Rows take turns; the best round
counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.decoding import read_prompts
from benchmarks.report import print_json, print_table
from grpc_comm.channel import open_channel
from inference.commit import Delta
from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_PROMPTS,
    BUNDLED_TARGET,
    ConnectionConfig,
    DraftConfig,
    FusedConfig,
    ModelConfig,
    ProposerConfig,
)
from inference.engine.draft import DraftEngine
from inference.request import Grammar, GrammarKind, SamplingParams, Schedule
from inference.serving.assembly import load_proposer, private_worker, reader_of, running, target_engine
from inference.serving.processes import ServerProcess, free_port, server_process
from inference.workers.calls.fleet import connected
from inference.workers.completing.failover import FailoverCompleter
from inference.workers.completing.local import LocalCompleter
from inference.workers.completing.remote import RemoteCompleter, card_of_target
from inference.workers.completion import Completer, CompletionRequest
from inference.workers.drafting.private import PrivateWorker

SCHEMA = {
    "type": "object",
    "properties": {
        "main_character": {"type": "string", "maxLength": 24},
        "kind_of_character": {"enum": ["girl", "boy", "animal", "thing", "other"]},
        "place_of_the_story": {"type": "string", "maxLength": 24},
        "number_of_friends": {"type": "integer", "minimum": 0, "maximum": 20},
        "has_a_happy_ending": {"type": "boolean"},
    },
    "required": [
        "main_character",
        "kind_of_character",
        "place_of_the_story",
        "number_of_friends",
        "has_a_happy_ending",
    ],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
GAMMA = 4
NUM_TOKENS = 96


@dataclass
class Figures:
    """Figures of one row: the best rate, and the counts of its draft tokens."""

    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True)
class Row:
    """Way to serve: a completer with a draft length and a schedule."""

    completer: Completer
    gamma: int | None = None
    schedule: Schedule | None = None


def main() -> None:
    asyncio.run(_main(_parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of two prompts")
    parser.add_argument("--prompts", type=int, default=8, help="stories to extract from (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    return parser


async def _main(args: argparse.Namespace) -> None:
    num_prompts, rounds = (2, 1) if args.quick else (args.prompts, 3)
    prompts = read_prompts(BUNDLED_PROMPTS, num_prompts)
    sampling = SamplingParams(temperature=args.temperature)
    results: dict[str, dict[str, Figures]] = {}
    async with _rows() as rows:
        for name, grammar in (("with", GRAMMAR), ("without", None)):
            requests = [_request(prompt, sampling, seed, grammar) for seed, prompt in enumerate(prompts)]
            results[name] = await _measure(rows, requests, rounds)
    for name, figures in results.items():
        _print(name, figures)
    print_json("structured", {name: {k: _json(f) for k, f in each.items()} for name, each in results.items()})


def _request(prompt: str, sampling: SamplingParams, seed: int, grammar: Grammar | None) -> CompletionRequest:
    """Return a request; it has the same token limit with and without a grammar."""
    return CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=NUM_TOKENS, grammar=grammar)


@asynccontextmanager
async def _rows() -> AsyncGenerator[dict[str, Row], None]:
    """Yield every topology, the plain one first."""
    async with AsyncExitStack() as stack:
        port = free_port()
        flags = ("--model", str(BUNDLED_TARGET), "--port", str(port), "--threads", "1")
        target = await stack.enter_async_context(server_process("target", "target", *flags, port=port))
        channel = await stack.enter_async_context(open_channel(target.address))
        alone = RemoteCompleter(channel, target.address, deadline_s=120.0)
        drafted = await stack.enter_async_context(_distributed(target, grammared=True))
        ungrammared = await stack.enter_async_context(_distributed(target, grammared=False))
        yield {
            "plain": Row(alone, gamma=0),
            "target alone, forced tokens": Row(alone),
            "distributed sync": Row(drafted, GAMMA, Schedule.SYNC),
            "distributed sync, draft without grammar": Row(ungrammared, GAMMA, Schedule.SYNC),
            "distributed async": Row(drafted, GAMMA, Schedule.ASYNC),
            "distributed async, draft without grammar": Row(ungrammared, GAMMA, Schedule.ASYNC),
            "fused": Row(await stack.enter_async_context(_fused())),
        }


def _draft_config() -> ProposerConfig:
    return ProposerConfig(BUNDLED_DRAFT, ModelConfig(BUNDLED_DRAFT, num_slots=3, num_threads=1), 1, branches=2)


@asynccontextmanager
async def _distributed(target: ServerProcess, *, grammared: bool) -> AsyncGenerator[Completer, None]:
    loaded = await load_proposer(_draft_config())
    config = DraftConfig(ConnectionConfig("127.0.0.1", target.port))
    async with connected(config.connection) as fleet:
        card = await card_of_target(fleet)
        if grammared:
            async with private_worker(loaded, config, fleet, card) as (worker, _):
                yield FailoverCompleter(fleet, config.connection, worker)
            return
        async with running(DraftEngine(loaded.proposer)) as engine:
            reader = reader_of(loaded, card, loaded.tokenizer)
            worker = PrivateWorker(engine, fleet, config, loaded.vocabulary, reader)
            yield FailoverCompleter(fleet, config.connection, worker)
            await worker.stop()


@asynccontextmanager
async def _fused() -> AsyncGenerator[Completer, None]:
    model = ModelConfig(BUNDLED_TARGET, num_slots=1, num_threads=1)
    async with target_engine(FusedConfig(model, _draft_config()), max_waiting=1) as loaded:
        yield LocalCompleter(loaded.engine, loaded.tokenizer)


async def _measure(rows: dict[str, Row], requests: Sequence[CompletionRequest], rounds: int) -> dict[str, Figures]:
    results = {name: Figures() for name in rows}
    expected = await _run(rows["plain"], requests, Figures())
    for _ in range(rounds):
        for name, row in rows.items():
            if await _run(row, requests, results[name]) != expected:
                raise SystemExit(f"{name}: other tokens than plain decoding")
    return results


async def _run(row: Row, requests: Sequence[CompletionRequest], figures: Figures) -> list[list[int]]:
    """Send one request after the other; return their tokens."""
    outputs: list[list[int]] = []
    started = time.perf_counter()
    for request in requests:
        outputs.append([])
        async for event in row.completer.complete(replace(request, gamma=row.gamma, schedule=row.schedule)):
            if isinstance(event, Delta):
                outputs[-1] += event.token_ids
                figures.num_passes += 1
                figures.num_draft_tokens += event.num_draft_tokens
                figures.num_accepted_tokens += event.num_accepted_tokens
    num_tokens = sum(map(len, outputs))
    figures.num_tokens += num_tokens
    figures.tokens_per_s = max(figures.tokens_per_s, num_tokens / (time.perf_counter() - started))
    return outputs


def _print(name: str, results: dict[str, Figures]) -> None:
    plain = results["plain"].tokens_per_s
    body = [
        [
            topology,
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_s / plain:.2f}",
            "-" if each.acceptance is None else f"{each.acceptance:.3f}",
            f"{each.num_tokens / each.num_passes:.2f}",
        ]
        for topology, each in results.items()
    ]
    print_table(f"{name} a grammar", ["topology", "tokens/s", "/ plain", "accepted", "tokens/pass"], body)


def _json(figures: Figures) -> dict[str, float | None]:
    return {
        "tokens_per_s": figures.tokens_per_s,
        "acceptance": figures.acceptance,
        "tokens_per_pass": figures.num_tokens / figures.num_passes,
    }


if __name__ == "__main__":
    main()
