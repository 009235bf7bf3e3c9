"""What is kept of one request: its tokens, and when each round's tokens arrived."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from inference.commit import NO_OWN_DRAFTS, NOTHING_COUNTED, Counts, OwnDrafts, Timings
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
    counts: Counts = NOTHING_COUNTED
    own: OwnDrafts = NO_OWN_DRAFTS


@dataclass(frozen=True)
class RequestRecord:
    """A request that is over.

    Attributes:
        prompt_index: which prompt of its set.
        sent_s: when it was sent, or was to be sent where requests come on their own; in seconds of a clock that all
            requests of the same run share.
        num_prompt_tokens: of the prompt.
        token_ids: the answer; empty where the server tells text alone.
        rounds: in order; the first includes the reading of the prompt.
        error_code: name of the gRPC status, or number of HTTP's, with which it failed; None: it was answered.
        error_message: for people.
        text: the answer's.
        model_id: what the server says its tokens depend on; empty: nothing.
        is_estimated: the server does not count tokens; its messages were counted instead.
        failed_s: seconds from when it was sent until it failed; 0 if it was answered.
    """

    prompt_index: int
    sent_s: float
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    error_code: str | None = None
    error_message: str = ""
    text: str = ""
    model_id: str = ""
    is_estimated: bool = False
    failed_s: float = 0.0

    @cached_property
    def stats(self) -> RequestStats:
        """Figures as every other part of the project defines them."""
        arrivals = ((item.arrived_s, item, item.num_tokens) for item in self.rounds)
        return RequestStats.of(arrivals, num_prompt_tokens=self.num_prompt_tokens)
