"""Time to the first token of a chat's last turn, with its earlier turns held in a slot and without.

    python -m benchmarks.chat_turns [--quick]

It runs the bundled models, one chat at a time, with a target process and the draft in this one. Each chat has ten turns
of random tokens and real answers. The last turn is asked twice, in changing order: as the same chat, and under a salt
of its own, so that all of it is read. Both must give the same tokens, or the benchmark ends. Figures are medians over
the chats.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.report import print_json, print_table
from grpc_comm.channel import open_channel
from inference.commit import Delta, Started
from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    ConnectionConfig,
    DraftConfig,
    FusedConfig,
    ModelConfig,
    ProposerConfig,
)
from inference.serving.assembly import load_proposer, private_worker, target_engine
from inference.serving.processes import free_port, server_process
from inference.workers.calls.fleet import connected
from inference.workers.completing.failover import FailoverCompleter
from inference.workers.completing.local import LocalCompleter
from inference.workers.completing.remote import RemoteCompleter, card_of_target
from inference.workers.completion import Completer, CompletionRequest

NUM_TURNS = 10
NUM_ANSWER_TOKENS = 24
GOAL = 0.15
"""Share of the uncached time to the first token that the cached one should take at most."""


@dataclass(slots=True)
class Answer:
    """Tokens and figures of one answer."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    ttft_ms: float = 0.0


def main() -> None:
    asyncio.run(_main(_parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat_turns", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two chats")
    parser.add_argument("--chats", type=int, default=9, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=1500, help="of the last turn's prompt (%(default)s)")
    return parser


async def _main(args: argparse.Namespace) -> None:
    pairs: dict[str, list[tuple[Answer, Answer]]] = {}
    async with _topologies() as completers:
        for number in range(2 if args.quick else args.chats):
            for name, completer in completers.items():
                pair = await _last_turn(completer, f"{name} {number}", args.tokens)
                pairs.setdefault(name, []).append(pair)
    figures = {name: _figures(each) for name, each in pairs.items()}
    header = ["topology", "cached tokens", "uncached, ms", "cached, ms", "cached / uncached"]
    rows = [
        [
            name,
            str(each["cached_tokens"]),
            f"{each['uncached_ms']:.1f}",
            f"{each['cached_ms']:.1f}",
            f"{each['ratio']:.3f}",
        ]
        for name, each in figures.items()
    ]
    print_table(f"first token of turn {NUM_TURNS}, {args.tokens} tokens; the goal is {GOAL}", header, rows)
    print_json("chat_turns", figures)


@asynccontextmanager
async def _topologies() -> AsyncGenerator[dict[str, Completer], None]:
    """Yield the target alone, a draft in front of it, and both in one process."""
    async with AsyncExitStack() as stack:
        port = free_port()
        flags = ("--model", str(BUNDLED_TARGET), "--port", str(port), "--threads", "1", "--batch", "2")
        target = await stack.enter_async_context(server_process("target", "target", *flags, port=port))
        channel = await stack.enter_async_context(open_channel(target.address))
        loaded = await load_proposer(_draft())
        config = DraftConfig(ConnectionConfig("127.0.0.1", port))
        fleet = await stack.enter_async_context(connected(config.connection))
        card = await card_of_target(fleet)
        worker, _ = await stack.enter_async_context(private_worker(loaded, config, fleet, card))
        pair = FusedConfig(ModelConfig(BUNDLED_TARGET, backend="auto", num_slots=2, num_threads=1), _draft())
        fused = await stack.enter_async_context(target_engine(pair, max_waiting=1))
        yield {
            "target alone": RemoteCompleter(channel, target.address, deadline_s=120.0),
            "distributed": FailoverCompleter(fleet, config.connection, worker),
            "fused": LocalCompleter(fused.engine, fused.tokenizer),
        }


def _draft() -> ProposerConfig:
    model = ModelConfig(BUNDLED_DRAFT, backend="auto", num_threads=1)
    return ProposerConfig(BUNDLED_DRAFT, model, num_slots=2, branches=1)


async def _last_turn(completer: Completer, name: str, num_tokens: int) -> tuple[Answer, Answer]:
    """Run a chat up to its last turn; return that turn's answers, with the earlier turns held and without."""
    rng, chat = random.Random(name), list[int]()
    for turn in range(1, NUM_TURNS):
        _say(chat, rng, turn * num_tokens // NUM_TURNS)
        chat += (await _ask(completer, chat, name)).token_ids
    _say(chat, rng, num_tokens)
    salts = (name, f"{name}, alone")
    order = salts if rng.random() < 0.5 else salts[::-1]
    answers = {salt: await _ask(completer, chat, salt) for salt in order}
    cached, uncached = (answers[salt] for salt in salts)
    if cached.token_ids != uncached.token_ids or uncached.num_cached_tokens:
        raise SystemExit("the cached turn has other tokens, or the uncached one was not read whole")
    return cached, uncached


def _say(chat: list[int], rng: random.Random, num_tokens: int) -> None:
    """Append random tokens of the user until the chat has `num_tokens` tokens."""
    chat += [rng.randrange(3, 2000) for _ in range(num_tokens - len(chat))]


async def _ask(completer: Completer, prompt: Sequence[int], salt: str) -> Answer:
    answer, started = Answer(), time.perf_counter()
    request = CompletionRequest(tuple(prompt), max_new_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, cache_salt=salt)
    async for event in completer.complete(request):
        if isinstance(event, Started):
            answer.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Delta):
            answer.ttft_ms = answer.ttft_ms or (time.perf_counter() - started) * 1e3
            answer.token_ids += event.token_ids
    return answer


def _figures(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, float]:
    cached, uncached = (median(pair[i].ttft_ms for pair in pairs) for i in (0, 1))
    num_cached = round(median(pair[0].num_cached_tokens for pair in pairs))
    return {"cached_tokens": num_cached, "uncached_ms": uncached, "cached_ms": cached, "ratio": cached / uncached}


if __name__ == "__main__":
    main()
