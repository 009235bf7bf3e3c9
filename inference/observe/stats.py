"""What one request cost: counters and timings, in seconds unless a name says otherwise."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from inference.commit import Timings


@dataclass(slots=True)
class RequestStats:
    """Filled while a request streams.

    Attributes:
        started: when the request was sent (monotonic seconds), as are the arrivals.
        arrivals: (when, how many tokens) of each message with tokens.
        num_own_tokens: of passes that had no proposal to verify.
        passes_by_draft_tokens: [i] counts the passes that verified i draft tokens.
        drafted_by_position, accepted_by_position: [i] counts the proposals that had, or kept, a token number i.
    """

    started: float = field(default_factory=time.monotonic)
    num_prompt_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_proposals: int = 0
    num_tokens_of_proposals: int = 0
    num_own_tokens: int = 0
    passes_by_draft_tokens: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    timings: list[Timings] = field(default_factory=list)

    def record(self, num_tokens: int, num_draft_tokens: int, num_accepted_tokens: int, timings: Timings) -> None:
        """Count one commit that has just arrived."""
        self.arrivals.append((time.monotonic(), num_tokens))
        self.timings.append(timings)
        passes = self.passes_by_draft_tokens
        passes.extend([0] * (num_draft_tokens + 1 - len(passes)))
        passes[num_draft_tokens] += 1
        if not num_draft_tokens:
            self.num_own_tokens += num_tokens
            return
        self.num_verified_proposals += 1
        self.num_tokens_of_proposals += num_tokens
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
        """Request sent until first token."""
        return self.arrivals[0][0] - self.started if self.arrivals else 0.0

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end - TTFT) / (output tokens - 1); None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages with tokens."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified draft tokens; None if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens per target pass that verified a proposal; None if none did."""
        if not self.num_verified_proposals:
            return None
        return self.num_tokens_of_proposals / self.num_verified_proposals

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.end_to_end_s if self.end_to_end_s else 0.0

    @property
    def wire_bytes(self) -> int:
        """Between draft worker and target, both directions."""
        return sum(timings.bytes_up + timings.bytes_down for timings in self.timings)


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1
