"""What is kept of one request: its tokens, and when each round's tokens arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inference.commit import Timings
from inference.observe.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Round:
    """One commit as the client saw it.

    Attributes:
        arrived_s: seconds since the request was sent.
        num_tokens: tokens that it brought.
    """

    arrived_s: float
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Timings


@dataclass(frozen=True)
class RequestRecord:
    """A request that has been answered.

    Attributes:
        prompt_index: which prompt of its set.
        sent_s: when it was sent, in seconds of a clock that all requests of the same run share.
        num_prompt_tokens: of the prompt.
        token_ids: the answer.
        rounds: in order; the first includes the reading of the prompt.
    """

    prompt_index: int
    sent_s: float
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]

    @cached_property
    def stats(self) -> RequestStats:
        """Figures as every other part of the project defines them."""
        stats = RequestStats(started=0.0, num_prompt_tokens=self.num_prompt_tokens)
        for item in self.rounds:
            stats.record(item.num_tokens, item.num_draft_tokens, item.num_accepted_tokens, item.timings)
        # `record` stamps the present; what counts is when each round arrived.
        stats.arrivals = [(item.arrived_s, item.num_tokens) for item in self.rounds]
        return stats


def record_from_json(fields: Mapping[str, Any]) -> RequestRecord:
    """A record as the Locust user writes it."""
    return RequestRecord(
        prompt_index=fields["prompt_index"],
        sent_s=fields["sent_s"],
        num_prompt_tokens=fields["num_prompt_tokens"],
        token_ids=tuple(fields["token_ids"]),
        rounds=tuple(Round(**{**item, "timings": Timings(**item["timings"])}) for item in fields["rounds"]),
    )
