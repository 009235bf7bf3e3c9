"""Thresholds of the claims, set before anything runs, and the amounts of work of a whole and of a small run."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TEXTS_CHANGED = 0
"""Most texts that may differ from the target's own, with whatever drafts, and after a server was killed."""
LAW_ALPHA = 0.001
"""Least p-value with which a server passes the test of sampling; a wrong rule counts as found if it is below."""
NUM_MUTANT = 150_000
"""Number of tokens that each wrong rule draws: so many that a token drawn in 63 % instead of 60 % is found."""
LEAST_SPEED = 0.95
"""Least speed, as a multiple of the target alone, that every topology must have under every condition measured."""
MOST_FAILED_STARTS = 0

DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.0, 0.7)
SEED = 66


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work of a run.

    Attributes:
        num_prompts, num_tokens: number of prompts for each comparison of texts, and of tokens of each answer.
        num_law: number of answers for the test of sampling.
        speed: flags of the comparison of speeds.
        num_failovers: number of targets that are killed.
        num_starts: number of times that servers of all roles start at once.
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
