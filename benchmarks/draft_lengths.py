"""As many draft tokens as pay, against the best fixed length: `python -m benchmarks.draft_lengths [--seconds 420]`.

Fused decoding of the bundled pair without a server, greedy, one thread, never stopping early. Each prompt has its own
best fixed length. It is picked in every other round and compared in the rounds between, so that it is no lucky one.
"As many as pay" has learned from all earlier prompts, as in a server that runs; "first answer" knows nothing when it
begins. A ratio is how many times as many tokens per second as with the fixed length; "by CPU" counts this process's CPU
time, which is the more reliable figure on a busy machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from benchmarks.decoding import decode, encode_all, load_model, read_prompts
from benchmarks.report import print_json, print_table
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, FUSED_GAMMA, ROOT
from inference.model.slots import Backend
from inference.scheduling.draft_length import DraftLength
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.speculation.speculative_decoder import SpeculativeDecoder

FIXED = (2, 3, 4, 5, 6, 8, 10, 11, 12, 14, 16)
AUTOMATIC, FIRST = "as many as pay", "first answer"
DTYPES = ("float32", "int8")
CLOCKS = (time.perf_counter, time.process_time)
Variant: TypeAlias = int | str


@dataclass(slots=True)
class Cell:
    """Seconds of one prompt in one number format: per variant and round, of the clock and of the CPU."""

    name: str
    prompt: Sequence[int]
    taken: dict[Variant, list[tuple[float, float]]] = field(default_factory=dict)

    def ratio(self, variant: str, clock: int) -> float:
        """Return the median rate over that of the best fixed length of the other rounds."""
        ratios = []
        for parity in (0, 1):
            fixed = self.best(clock, parity)
            rounds = range(1 - parity, len(self.taken[variant]), 2)
            ratios += [self.taken[fixed][each][clock] / self.taken[variant][each][clock] for each in rounds]
        return statistics.median(ratios)

    def best(self, clock: int, parity: int) -> Variant:
        """Return the fixed length with the least median time in the even or odd rounds."""
        return min(FIXED, key=lambda gamma: statistics.median(each[clock] for each in self.taken[gamma][parity::2]))


class Decoders:
    """Decoders of the pair in one number format."""

    def __init__(self, dtype: str) -> None:
        self._target, self._draft = (
            load_model(path, backend="onnx", threads=1, dtype=dtype) for path in (BUNDLED_TARGET, BUNDLED_DRAFT)
        )
        self._fixed = _decoder(self._target, self._draft, None)
        self._automatic = _decoder(self._target, self._draft, DraftLength())

    def seconds(self, cell: Cell, variant: Variant, num_tokens: int) -> tuple[float, float]:
        """Decode once, and return the seconds by both clocks."""
        decoder = self._fixed if isinstance(variant, int) else self._automatic
        if variant == FIRST:
            decoder = _decoder(self._target, self._draft, DraftLength())
        gamma = variant if isinstance(variant, int) else FUSED_GAMMA
        began = [clock() for clock in CLOCKS]
        decode(decoder, cell.prompt, gamma=gamma, num_tokens=num_tokens)
        wall_s, cpu_s = (clock() - start for clock, start in zip(CLOCKS, began, strict=True))
        return wall_s, cpu_s


def _decoder(target: Backend, draft: Backend, length: DraftLength | None) -> SpeculativeDecoder:
    return SpeculativeDecoder(SlotDecoder(target), ModelProposer(draft), length)


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    prompts = {
        f"{kind} {number}": prompt
        for kind in args.kinds.split(",")
        for number, prompt in enumerate(_prompts(kind, args.num_prompts), 1)
    }
    cells = {dtype: [Cell(name, prompt) for name, prompt in prompts.items()] for dtype in DTYPES}
    num_rounds = _race(cells, args.tokens, args.seconds)
    _report(cells, num_rounds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_lengths", description=__doc__)
    parser.add_argument("--kinds", default="open_ended,structured,study_code", help="files of prompts (%(default)s)")
    parser.add_argument("--num_prompts", type=int, default=4, help="of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt (%(default)s)")
    parser.add_argument("--seconds", type=float, default=420.0, help="no round begins later (%(default)s)")
    return parser


def _prompts(kind: str, count: int) -> list[list[int]]:
    return encode_all(read_prompts(ROOT / "prompts" / f"{kind}.txt", count), BUNDLED_TARGET)


def _race(cells: dict[str, list[Cell]], num_tokens: int, seconds: float) -> int:
    """Let all variants take turns at each prompt, in rounds of random order; return the number of rounds, at least 2.

    The round before the first one is not counted: models and estimates are new in it.
    """
    ends, rng = time.monotonic() + seconds, random.Random(0)
    decoders = {dtype: Decoders(dtype) for dtype in cells}
    variants: list[Variant] = [*FIXED, AUTOMATIC, FIRST]
    for dtype, rows in cells.items():
        for cell in rows:
            decoders[dtype].seconds(cell, AUTOMATIC, num_tokens)
    num_rounds = 0
    while num_rounds < 2 or time.monotonic() < ends:
        for dtype, rows in cells.items():
            for cell in rows:
                for variant in rng.sample(variants, len(variants)):
                    taken = decoders[dtype].seconds(cell, variant, num_tokens)
                    cell.taken.setdefault(variant, []).append(taken)
        num_rounds += 1
    return num_rounds


def _report(cells: dict[str, list[Cell]], num_rounds: int) -> None:
    body: list[list[str]] = []
    found: list[dict[str, Any]] = []
    for dtype, rows in cells.items():
        for cell in rows:
            ratios = {f"{variant}, {by}": cell.ratio(variant, clock) for variant, by, clock in _columns()}
            best = [cell.best(1, parity) for parity in (0, 1)]
            body.append([dtype, cell.name, f"{best[0]}, {best[1]}", *(f"{ratio:.2f}" for ratio in ratios.values())])
            found.append({"dtype": dtype, "prompt": cell.name, "best": best, **ratios})
    for name, of in (("median", statistics.median), ("least", min)):
        body.append([name, "", "", *(f"{of([each[key] for each in found]):.2f}" for key in _keys())])
    header = ["", "prompt", "best fixed", *_keys()]
    print_table(f"Rate over that of the best fixed length, {num_rounds} rounds", header, body)
    print_json("draft_lengths", {"num_rounds": num_rounds, "cells": found})


def _columns() -> list[tuple[str, str, int]]:
    return [(variant, by, clock) for variant in (AUTOMATIC, FIRST) for clock, by in enumerate(("clock", "by CPU"))]


def _keys() -> list[str]:
    return [f"{variant}, {by}" for variant, by, _ in _columns()]


if __name__ == "__main__":
    main()
