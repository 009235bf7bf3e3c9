"""The rule for draft lengths on recorded drafts, with a clock of its own: `python -m benchmarks.replayed_drafts`.

The bundled pair is recorded once, in both number formats: what the draft proposes at each position of each answer, how
sure it is, and how much of it the target accepts. The rule then decides over passes whose times come from a formula, so
the result is the same on every machine, however busy it is. The formula disturbs the times: each by a few percent, some
much more, as other processes do, and the first pass of each width, in which a backend finds memory.

A ratio is how many times as many tokens per second as with the prompt's best fixed length. "As many as pay" has learned
from the earlier prompts, all of them once before the first round that counts; "first answer" knows nothing when it
begins.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.decoding import GREEDY, decode, encode_all, load_model, read_prompts
from benchmarks.draft_lengths import FIXED
from benchmarks.report import print_json, print_table
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT
from inference.model.proposer import Draft, DraftToken
from inference.scheduling.draft_length import DraftLength
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder

KINDS, NUM_PROMPTS = ("open_ended", "structured", "study_code"), 4
NUM_TOKENS, LONGEST = 128, 16
STEP_S = {"float32": 105e-6, "int8": 125e-6}
SEEDS = range(6)
RULE_S = 8e-6
"""Seconds that ranking the runner-up and deciding take for each draft token."""
GOAL = 0.92
STATISTICS = ("median", "least", f"share below {GOAL}")
Recording: TypeAlias = list[tuple[list[DraftToken], int]]  # draft and number of accepted tokens, by position


@dataclass(slots=True)
class Disturbance:
    """Factors on the times that the rule sees.

    Attributes:
        spread: standard deviation of the logarithm of each.
        share: share of times that another process makes up to 2.5 times as long.
        first: share that is added to the first pass of each width.
    """

    spread: float
    share: float
    first: float
    rng: random.Random
    seen: set[int] = field(default_factory=set)

    def renewed(self) -> Disturbance:
        """Return one for which every width is new."""
        return Disturbance(self.spread, self.share, self.first, self.rng)

    def of(self, seconds: float, width: int | None = None) -> float:
        factor = math.exp(self.rng.gauss(0, self.spread))
        if self.rng.random() < self.share:
            factor *= 1 + 1.5 * self.rng.random()
        if width is not None and width not in self.seen:
            self.seen.add(width)
            factor *= 1 + self.first
        return seconds * factor


def main() -> None:
    args = _parser().parse_args()
    recordings = {dtype: [*_recorded(dtype)] for dtype in STEP_S}
    rows, found = [], {}
    for name, disturbance in (("none", (0.0, 0.0, 0.0)), ("some", (0.03, 0.02, 0.3)), ("much", (0.06, 0.08, 0.5))):
        warm, first = _ratios(recordings, disturbance, args.rounds)
        found[name] = {"as many as pay": warm, "first answer": first}
        rows.append([name, *(f"{of(each):.2f}" for each in (warm, first) for of in (statistics.median, min, _lost))])
    header = ["disturbance", *(f"{name}{of}" for name in ("as many as pay, ", "first answer, ") for of in STATISTICS)]
    print_table(f"Rate over that of the best fixed length, 24 cells, {len(SEEDS)} seeds", header, rows)
    print_json("replayed_drafts", found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replayed_drafts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="of all prompts (%(default)s)")
    return parser


def _lost(ratios: Sequence[float]) -> float:
    return sum(ratio < GOAL for ratio in ratios) / len(ratios)


def _recorded(dtype: str) -> Iterable[Recording]:
    """Yield the recording of each prompt."""
    target, draft = (
        load_model(path, backend="onnx", threads=1, dtype=dtype) for path in (BUNDLED_TARGET, BUNDLED_DRAFT)
    )
    proposer = ModelProposer(draft)
    for kind in KINDS:
        for prompt in encode_all(read_prompts(ROOT / "prompts" / f"{kind}.txt", NUM_PROMPTS), BUNDLED_TARGET):
            answer, _ = decode(SlotDecoder(target), prompt, gamma=0, num_tokens=NUM_TOKENS + LONGEST)
            proposer.begin(0, 0, ())
            yield [_at(proposer, [*prompt, *answer[:place]], answer[place:]) for place in range(NUM_TOKENS)]


def _at(proposer: ModelProposer, before: list[int], after: Sequence[int]) -> tuple[list[DraftToken], int]:
    """Return the longest draft after the tokens `before`, and how many of its tokens are those of `after`."""
    chain: list[DraftToken] = []
    while len(chain) < LONGEST:
        [tokens] = proposer.extend([Draft(0, [*before, *(t.token_id for t in chain)], GREEDY, 1)], ranked=True)
        chain += tokens or ()  # None while a long prompt is read
    agreed = [token.token_id == own for token, own in zip(chain, after, strict=False)]
    return chain, agreed.index(False) if False in agreed else len(agreed)


def _ratios(
    recordings: dict[str, list[Recording]], disturbance: tuple[float, float, float], rounds: int
) -> tuple[list[float], list[float]]:
    """Return one ratio per cell and seed, of "as many as pay" and of "first answer"."""
    warm, first = [], []
    for dtype, seed in itertools.product(recordings, SEEDS):
        length, clock = DraftLength(), Disturbance(*disturbance, random.Random(seed))
        best = [min(_fixed_s(dtype, each, gamma) for gamma in FIXED) for each in recordings[dtype]]
        turns = [[_automatic_s(dtype, each, length, clock) for each in recordings[dtype]] for _ in range(rounds + 1)]
        warm += [best_s / statistics.fmean(taken) for best_s, *taken in zip(best, *turns[1:], strict=True)]
        new = [_automatic_s(dtype, each, DraftLength(), clock.renewed()) for each in recordings[dtype]]
        first += [best_s / taken_s for best_s, taken_s in zip(best, new, strict=True)]
    return warm, first


def _fixed_s(dtype: str, recording: Recording, gamma: int) -> float:
    """Return the seconds of an answer with drafts of a fixed length."""
    place, taken_s = 0, 0.0
    while place < NUM_TOKENS:
        number = min(gamma, NUM_TOKENS - 1 - place)
        taken_s += number * STEP_S[dtype] + _pass_s(dtype, number)
        place += min(recording[place][1], number) + 1
    return taken_s


def _automatic_s(dtype: str, recording: Recording, length: DraftLength, clock: Disturbance) -> float:
    """Return the seconds of an answer with drafts as long as the rule has them; it learns."""
    place, taken_s, step_s = 0, 0.0, STEP_S[dtype] + RULE_S
    length.begin(0)
    while place < NUM_TOKENS:
        (drafted, num_right), chain = recording[place], list[DraftToken]()
        while len(chain) < min(LONGEST, NUM_TOKENS - 1 - place) and length.worth([(0, chain)], [], 1)[0]:
            chain.append(drafted[len(chain)])
            length.record_step(1, clock.of(step_s))
        number, pass_s = len(chain), _pass_s(dtype, len(chain))
        taken_s += number * step_s + pass_s
        length.record_verdict(0, chain, min(num_right, number))
        if place:  # the first pass reads the prompt
            length.record_pass(1, number, clock.of(pass_s, number))
        place += min(num_right, number) + 1
    return taken_s


def _pass_s(dtype: str, num_draft_tokens: int) -> float:
    """Return the undisturbed seconds of a target's pass, near those of an AMD EPYC with AVX-512 and VNNI."""
    rows = num_draft_tokens + 1
    if dtype == "int8":
        return 530e-6 + 48e-6 * rows
    if rows > 12:
        return 3900e-6 + 90e-6 * (rows - 13)
    return 2900e-6 if rows > 6 else (1150e-6, 1400e-6, 1600e-6, 1750e-6, 1850e-6, 1930e-6)[rows - 1]


if __name__ == "__main__":
    main()
