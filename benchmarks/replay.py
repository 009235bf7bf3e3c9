"""Worth of predictions and kept answers, cost of an audit: `python -m benchmarks.replay [--rounds 5]`, three minutes.

The bundled pair answers prompts with fixed seeds, one at a time: the target alone and the pair, each without, then with
what it answered before (`--replay`, and as a prediction). The same answers predict those of the 8-bit target. For edits
of code, the prediction is the answer with an identifier renamed; a useless one is the answer to another prompt. An
audit of each answer is compared with reading prompt and answer as a prompt.

Seconds are the process's own of the CPU, with one thread a model, so that other programs count less. The ways take
turns in each round; the last column is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from benchmarks.report import print_json, print_table
from specdec.inference.commit import Delta
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, FusedConfig, ModelConfig, ProposerConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.request import SamplingParams
from specdec.inference.serving.assembly import target_engine
from specdec.inference.speculation.answers import KeptAnswers, Origin
from specdec.inference.workers.completing.audit import audited
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import CompletionRequest

PROMPTS = (
    "1, 2, 3, 4,",
    "Once upon a time",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    '{"name": "Ada", "age": 36}\n{"name":',
    "The capital of France is",
    "for i in range(10):\n    print(i)\n",
)
ANSWERS_BYTES = 16 * 2**20
Answered = tuple[float, float, list[str], list[tuple[int, ...]]]
"""Tokens per second of CPU time, tokens per pass, and the answers' texts and token ids."""


async def answered(completer: LocalCompleter, requests: Sequence[CompletionRequest]) -> Answered:
    """Complete requests one after another; return tokens per second of CPU time and per pass, texts, and token ids."""
    num_passes, texts, token_ids, started = 0, [], [], time.process_time()
    for request in requests:
        deltas = [each async for each in completer.complete(request) if isinstance(each, Delta) and each.token_ids]
        num_passes += len(deltas)
        texts.append("".join(each.text for each in deltas))
        token_ids.append(tuple(token_id for each in deltas for token_id in each.token_ids))
    num_tokens = sum(map(len, token_ids))
    return num_tokens / (time.process_time() - started), num_tokens / num_passes, texts, token_ids


def predicted(requests: Sequence[CompletionRequest], texts: Sequence[str]) -> list[CompletionRequest]:
    return [replace(request, prediction=text) for request, text in zip(requests, texts, strict=True)]


def renamed(text: str) -> str:
    """Return a text in which its most frequent word is replaced by `renamed_one`."""
    words = re.findall(r"[A-Za-z_]{2,}", text) or ["x"]
    return re.sub(rf"\b{statistics.mode(words)}\b", "renamed_one", text)


async def rows_of(
    engines: Mapping[str, LocalCompleter], requests: Sequence[CompletionRequest], rounds: int
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return medians by engine and by what its drafts come from ("nothing": from none of the sources measured here).

    They are tokens per second, tokens per pass, and the speed over that with "nothing". Each measurement has a cache
    salt of its own, so that it uses no answers that another one left. Only the 8-bit target may give other texts.
    """
    salts = map(str, range(10**9))
    _, _, texts, _ = await answered(engines["target"], [replace(each, cache_salt=next(salts)) for each in requests])
    ways: dict[str, Callable[[], list[CompletionRequest]]] = {
        "nothing": lambda: list(requests),
        "its prediction": lambda: predicted(requests, texts),
        "a renamed identifier": lambda: predicted(requests, list(map(renamed, texts))),
        "a useless prediction": lambda: predicted(requests, [*texts[1:], texts[0]]),
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for _ in range(rounds):
        for name, engine in engines.items():
            taken = found.setdefault(name, {})
            for way, make in ways.items():
                salt = next(salts)
                asked = [replace(each, cache_salt=f"{salt} {i}") for i, each in enumerate(make())]
                speed, length, here, _ = await answered(engine, asked)
                if here != texts and name != "int8 target":
                    raise SystemExit(f"{name} with {way} gave another text")
                taken.setdefault(way, []).append((speed, length))
                if way == "nothing":
                    speed, length, *_ = await answered(engine, asked)
                    taken.setdefault("a kept answer", []).append((speed, length))
        ways = dict([*ways.items()][1:] + [*ways.items()][:1])  # each is first in some rounds
    return {
        name: {way: _medians(pairs, taken["nothing"]) for way, pairs in taken.items()} for name, taken in found.items()
    }


def _medians(pairs: Sequence[tuple[float, float]], nothing: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    ratios = [speed / before for (speed, _), (before, _) in zip(pairs, nothing, strict=True)]
    return *(statistics.median(each) for each in zip(*pairs, strict=True)), statistics.median(ratios)


async def audit_seconds(
    completer: LocalCompleter, requests: Sequence[CompletionRequest], rounds: int
) -> dict[str, float]:
    """Return the median seconds for all requests, as "a prompt" and as "an audit".

    The first is reading a prompt and its answer as one prompt, the second an audit of the answer. Each prompt has a
    cache salt of its own, so that no cached prefix is used.
    """
    *_, answers = await answered(completer, requests)
    prompts = [await completer.codec.encode(str(each.prompt)) for each in requests]
    salts = map(str, range(10**9))
    taken: dict[str, list[float]] = {"a prompt": [], "an audit": []}
    for _ in range(rounds):
        for way, seconds in taken.items():
            started = time.process_time()
            for request, prompt, answer in zip(requests, prompts, answers, strict=True):
                asked = replace(request, prompt=prompt, cache_salt=f"audit {next(salts)}")
                if way == "an audit":
                    audit = await audited(completer, None, asked, answer)
                    assert audit.holds, audit.verdict
                else:
                    await answered(completer, [replace(asked, prompt=(*prompt, *answer), max_new_tokens=1)])
            seconds.append(time.process_time() - started)
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def memory() -> dict[str, float]:
    """Return bytes of memory per token of kept answers of 500 tokens: random ones, and ones that repeat themselves."""
    rng, found = random.Random(1), {}
    for kind, period in (("random", 500), ("repeating", 20)):
        kept = KeptAnswers(1 << 30)
        for number in range(400):
            kept.add(Origin("one", (number,)), [rng.randrange(32_000) for _ in range(period)] * (500 // period))
        found[kind] = kept.num_bytes / (400 * 500)
    return found


async def _run(args: argparse.Namespace) -> None:
    sampling = SamplingParams(temperature=args.temperature)
    requests = [
        CompletionRequest(prompt, sampling, seed=i, max_new_tokens=args.tokens, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    alone = ModelConfig(BUNDLED_TARGET, num_slots=1, num_threads=1, backend="onnx")
    draft = replace(alone, path=BUNDLED_DRAFT)
    pair = FusedConfig(alone, ProposerConfig(BUNDLED_TARGET, draft, num_slots=1), 8)
    configs: dict[str, ModelConfig | FusedConfig] = {
        "target": alone,
        "pair": pair,
        "int8 target": replace(alone, dtype="int8"),
    }
    async with AsyncExitStack() as stack:
        engines, limits = {}, EngineLimits(4, answers_bytes=ANSWERS_BYTES)
        for name, config in configs.items():
            running = await stack.enter_async_context(target_engine(config, limits))
            engines[name] = LocalCompleter(running.engine, running.tokenizer)
        found = await rows_of(engines, requests, args.rounds)
        audit = await audit_seconds(engines["target"], requests, args.rounds)
    body = [
        [name, way, f"{speed:.0f}", f"{length:.1f}", f"{ratio:.3f}"]
        for name, ways in found.items()
        for way, (speed, length, ratio) in ways.items()
    ]
    header = ["engine", "drafts from", "tokens/s", "tokens a pass", "over nothing"]
    print_table(f"the bundled pair, temperature {args.temperature:g}, {args.tokens} tokens", header, body)
    taken = memory()
    print_table("memory of kept answers", ["text", "bytes a token"], [[k, f"{v:.0f}"] for k, v in taken.items()])
    rows = [[way, f"{1e3 * seconds / len(requests):.1f}"] for way, seconds in audit.items()]
    print_table(f"audit of {args.tokens} tokens by the target", ["reading as", "ms"], rows)
    print_json("replay", {"speed": found, "bytes_a_token": taken, "audit_s": audit})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=120, help="output tokens of each answer (%(default)s)")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
