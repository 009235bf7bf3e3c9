"""Figures of one request: counts of tokens and passes, and times, in seconds unless a name has another unit."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from specdec.inference.commit import Commit, Counts, Opened, OwnDrafts, Started, TextEvent, Timings, TokenEvent

MAX_PASS_TOKENS = 4096
"""Most draft tokens counted for one pass; no real pass has more."""


SOURCES = ("draft", "lookup", "forced")
"""Sources of draft tokens: a draft model, lookup in known or predicted text, a grammar that allows one token alone."""


def by_source(one: Pass) -> dict[tuple[str, bool], int]:
    """Count the draft tokens of one pass by (one of `SOURCES`, whether they were accepted); zeros are left out."""
    own = one.own
    counts = (
        (one.num_draft_tokens - own.num_tokens, one.num_accepted_tokens - own.num_accepted),
        (own.num_lookup_tokens, own.num_lookup_accepted),
        (own.num_forced_tokens, own.num_forced_accepted),
    )
    found = {}
    for source, (num_verified, num_kept) in zip(SOURCES, counts, strict=True):
        if num_kept > 0:
            found[source, True] = num_kept
        if num_verified > num_kept:
            found[source, False] = num_verified - num_kept
    return found


class Pass(Protocol):
    """Figures of one target pass for one request, as a `Commit`, or a stored record of a pass, has them."""

    @property
    def num_draft_tokens(self) -> int: ...

    @property
    def num_accepted_tokens(self) -> int: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def counts(self) -> Counts: ...

    @property
    def own(self) -> OwnDrafts: ...

    @property
    def is_held(self) -> bool: ...


@dataclass(slots=True)
class RequestStats:
    """Figures of one request, filled while its answer streams.

    Attributes:
        started: time when the request was sent, in monotonic seconds.
        num_prompt_tokens: number of tokens of the prompt.
        num_cached_tokens: prompt tokens that the target found in a slot.
        arrivals: (time in monotonic seconds, number of tokens) of each message with tokens.
        num_draft_tokens, num_accepted_tokens: draft tokens that were verified, and how many of them were accepted.
        num_verified_proposals: passes that verified draft tokens.
        num_tokens_of_proposals: tokens that these passes committed.
        num_own_tokens: tokens that the other passes committed.
        passes_by_draft_tokens: [i] counts the passes that verified i draft tokens.
        drafted_by_position, accepted_by_position: [i] counts the passes that verified, or accepted, more than i draft
            tokens.
        timings, counts: times of each pass, and counts of the draft worker for it.
        by_source: numbers of draft tokens by (source, whether they were accepted).
        num_held: passes for which drafting was off, by `--drafting never` or since drafting would be slower.
    """

    started: float = field(default_factory=time.monotonic)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list, repr=False)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_proposals: int = 0
    num_tokens_of_proposals: int = 0
    num_own_tokens: int = 0
    passes_by_draft_tokens: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    timings: list[Timings] = field(default_factory=list, repr=False)
    counts: list[Counts] = field(default_factory=list, repr=False)
    by_source: Counter[tuple[str, bool]] = field(default_factory=Counter)
    num_held: int = 0

    def take(self, event: TextEvent | TokenEvent, at: float | None = None) -> None:
        """Count an event that has arrived at the time `at`, in monotonic seconds; None: now."""
        if isinstance(event, Started):
            self.num_prompt_tokens, self.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        elif isinstance(event, Opened):
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Commit):
            self.arrivals.append((time.monotonic() if at is None else at, len(event.token_ids)))
            self._count_pass(event, len(event.token_ids))

    @classmethod
    def of(cls, arrivals: Iterable[tuple[float, Pass, int]], *, num_prompt_tokens: int) -> RequestStats:
        """Return the figures of a request that has ended, from its stored messages.

        Args:
            arrivals: (seconds since the request was sent, pass, number of tokens) of each message with tokens.
            num_prompt_tokens: number of tokens of the prompt.
        """
        stats = cls(started=0.0, num_prompt_tokens=num_prompt_tokens)
        for arrived_s, one, num_tokens in arrivals:
            stats.arrivals.append((arrived_s, num_tokens))
            stats._count_pass(one, num_tokens)
        return stats

    def _count_pass(self, one: Pass, num_tokens: int) -> None:
        # The counts set the lengths of lists below, and a hostile peer may send four billion.
        num_draft_tokens = min(one.num_draft_tokens, MAX_PASS_TOKENS)
        num_accepted_tokens = min(one.num_accepted_tokens, num_draft_tokens)
        self.timings.append(one.timings)
        self.counts.append(one.counts)
        self.num_held += one.is_held
        passes = self.passes_by_draft_tokens
        passes.extend([0] * (num_draft_tokens + 1 - len(passes)))
        passes[num_draft_tokens] += 1
        if not num_draft_tokens:
            self.num_own_tokens += num_tokens
            return
        self.num_verified_proposals += 1
        self.num_tokens_of_proposals += num_tokens
        self.by_source.update(by_source(one))
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        _count_up_to(self.drafted_by_position, num_draft_tokens)
        _count_up_to(self.accepted_by_position, num_accepted_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.arrivals)

    @property
    def end_to_end_s(self) -> float:
        return self.arrivals[-1][0] - self.started if self.arrivals else 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first token; 0 without tokens."""
        return self.arrivals[0][0] - self.started if self.arrivals else 0.0

    @property
    def tpot_s(self) -> float | None:
        """Seconds per later token: (end-to-end - TTFT) / (output tokens - 1); None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages with tokens, in seconds."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per verified draft token; None if none was verified."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def drafting_share(self) -> float | None:
        """Share of the passes for which drafting was on; None without a pass."""
        return 1 - self.num_held / len(self.timings) if self.timings else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens per pass that verified draft tokens; None if no pass did."""
        if not self.num_verified_proposals:
            return None
        return self.num_tokens_of_proposals / self.num_verified_proposals

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.end_to_end_s if self.end_to_end_s else 0.0

    @property
    def wire_bytes(self) -> int:
        """Bytes between draft worker and target, both directions."""
        return sum(counts.bytes_up + counts.bytes_down for counts in self.counts)


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1
