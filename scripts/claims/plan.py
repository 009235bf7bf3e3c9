"""Thresholds of the claims, which stand here before anything runs, and the sizes of a whole and of a small run."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TEXTS_CHANGED = 0
"""Texts that may differ from the target's own, whatever drafts, and after a server was killed."""
LAW_ALPHA = 0.001
"""Least p-value of a server that follows its law; each mutant must be below it."""
NUM_MUTANT = 150_000
"""Tokens that each mutant draws: 63 % for 60 % is found although many places leave hardly a choice."""
LEAST_SPEED = 0.95
"""Least speed of any cell over the target alone, on a quiet machine."""
MOST_FAILED_STARTS = 0

DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.0, 0.7)
SEED = 66


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work.

    Attributes:
        num_prompts, num_tokens: prompts of each text, and tokens of each answer.
        num_law: answers for the test of the law.
        speed: flags of the comparison.
        num_failovers: servers that are killed.
        num_starts: times that all roles start at once.
    """

    num_prompts: int
    num_tokens: int
    num_law: int
    speed: tuple[str, ...]
    num_failovers: int
    num_starts: int


WHOLE = Size(24, 96, 12_000, ("--num_prompts", "4", "--num_runs", "5", "--concurrency", "1,4,16"), 6, 5)
SMALL = Size(
    4, 32, 600, ("--num_prompts", "1", "--num_runs", "1", "--concurrency", "1", "--max_new_tokens", "24"), 1, 1
)
