"""Record of one request: its tokens, and when those of each round (a pass of the target) arrived."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specdec.inference.commit import NO_OWN_DRAFTS, NOTHING_COUNTED, Counts, OwnDrafts, Timings
from specdec.inference.observe.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens that one pass of the target made final, as the client received them.

    Attributes:
        arrived_s: seconds since the request was sent.
        num_tokens: number of these tokens.
        num_draft_tokens, num_accepted_tokens: draft tokens that the pass verified, and how many of them were accepted.
        timings: parts of the time of the pass in microseconds, as the server reports them; 0 where not known.
        counts: bytes of messages and other counts of the draft worker for the pass; 0 where not known.
        own: how many of both the target itself had proposed, by lookup or from a grammar.
        is_held: whether drafting was off for the pass, because of a setting or because passes without drafts were
            faster.
    """

    arrived_s: float
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Timings
    counts: Counts = NOTHING_COUNTED
    own: OwnDrafts = NO_OWN_DRAFTS
    is_held: bool = False


@dataclass(frozen=True)
class RequestRecord:
    """Record of a request that was answered or has failed.

    Attributes:
        prompt_index: index of the prompt in its set.
        sent_s: time of sending, or the time due in an open loop, in seconds of a clock that all requests of the same
            run share.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: tokens of the prompt that the server did not read, because they were in its prefix cache.
        token_ids: tokens of the answer; empty if the server sends text only.
        rounds: one for each pass with tokens, in order; the first includes the reading of the prompt.
        error_code: name of the gRPC status, HTTP status, or kind of failure; None if the request was answered.
        error_message: readable details of the failure.
        text: text of the answer.
        model_id: server's fingerprint of everything that its tokens depend on; empty if it reports none.
        is_estimated: whether numbers of tokens are numbers of messages, because the server does not count tokens.
        failed_s: seconds from sending to failure; 0 if the request was answered.
        margin: difference in log-probability of the two tokens at which the answer parts from another server's; None if
            it does not part, or if no server reports it.
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
    num_cached_tokens: int = 0
    margin: float | None = None

    @property
    def ended_s(self) -> float:
        """Time at which the answer ended, or the request failed, in seconds on the clock of `sent_s`."""
        return self.sent_s + self.stats.end_to_end_s + self.failed_s

    @cached_property
    def stats(self) -> RequestStats:
        """Figures of the request, such as its time to first token; `RequestStats` defines them."""
        arrivals = ((item.arrived_s, item, item.num_tokens) for item in self.rounds)
        return RequestStats.of(arrivals, num_prompt_tokens=self.num_prompt_tokens)
