"""Parts of an answer, one per token or one per target pass, and the counts of one choice of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings, TokenLogprobs

ChoiceEvent: TypeAlias = tuple[int, TextEvent]
"""Index of a choice, and one of its events."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of one choice's text, as one chunk of a stream carries it.

    Attributes:
        text: text that the part adds; may be empty.
        accepted: for each token, whether it is an accepted draft token.
        logprobs: log-probabilities of each token, if the request asked for them; else empty.
        num_draft_tokens: draft tokens of the pass; 0 unless this is the pass's last part.
        token_ids: ids of the part's tokens.
        rejected_text: text of the pass's rejected draft tokens; empty unless this is the pass's last part.
        timings: times of the pass; None unless this is the pass's last part.
        finish_reason: reason why the choice ended; None except on its last part.
        is_prompt: True if the text is an echoed prompt; its first log-probability then has no meaning.
    """

    text: str
    accepted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_draft_tokens: int = 0
    finish_reason: FinishReason | None = None
    is_prompt: bool = False
    token_ids: tuple[int, ...] = ()
    rejected_text: str = ""
    timings: Timings | None = None


def parts_of(delta: Delta, *, per_token: bool) -> Iterator[Part]:
    """Yield the parts of a delta (what one target pass added): one for each of its tokens if `per_token`, else one."""
    num_tokens = len(delta.token_ids)
    accepted = tuple(i < delta.num_accepted_tokens for i in range(num_tokens))
    of_pass: dict[str, Any] = {
        "num_draft_tokens": delta.num_draft_tokens,
        "finish_reason": delta.finish_reason,
        "rejected_text": delta.rejected_text,
        "timings": delta.timings if num_tokens else None,
    }
    if not per_token or num_tokens <= 1:
        yield Part(delta.text, accepted, delta.logprobs, token_ids=delta.token_ids, **of_pass)
        return
    for i, piece in enumerate(delta.pieces()):
        of_part = of_pass if i == num_tokens - 1 else {}
        here = slice(i, i + 1)
        yield Part(piece, accepted[here], delta.logprobs[here], token_ids=delta.token_ids[here], **of_part)


@dataclass(slots=True)
class Choice:
    """Counts and text of one choice, that is, of one output that a request asks for, so far.

    Attributes:
        num_predicted_tokens, num_predicted_accepted: tokens of the request's prediction that passes verified, and how
            many of them were accepted.
        drafted: numbers of passes by (draft tokens, accepted draft tokens); passes without draft tokens do not count.
        num_held: passes for which drafting was off, by `--drafting never` or because it was slower.
        shows_prompt: True if an echoed prompt is a part of the answer.
        parts: all parts so far, if the answer is not streamed; else empty.
        num_characters: characters of the tokens for which log-probabilities were sent.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_predicted_tokens: int = 0  # of the request's prediction, that passes verified
    num_predicted_accepted: int = 0
    drafted: Counter[tuple[int, int]] = field(default_factory=Counter)  # passes, by draft tokens and accepted ones
    num_held: int = 0  # passes for which drafting was off
    prompt_text: str = ""
    shows_prompt: bool = True
    parts: list[Part] = field(default_factory=list)  # of an answer in one piece
    num_characters: int = 0  # of the tokens for which log-probabilities were sent
    finish_reason: FinishReason | None = None

    def take(self, event: TextEvent, *, per_token: bool) -> Iterator[Part]:
        """Count an event of the choice, and yield the parts to send for it: one per token if `per_token`, else one."""
        if isinstance(event, Started):
            self.num_prompt_tokens, self.num_cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
            self.prompt_text = event.prompt_text
            if self.shows_prompt and (event.prompt_text or event.prompt_logprobs):  # echo
                yield Part(event.prompt_text, logprobs=event.prompt_logprobs, is_prompt=True)
        elif isinstance(event, Delta):
            self.num_held += event.is_held
            if event.own.is_predicted:
                self.num_predicted_tokens += event.own.num_lookup_tokens
                self.num_predicted_accepted += event.own.num_lookup_accepted
            if event.num_draft_tokens:
                self.drafted[event.num_draft_tokens, event.num_accepted_tokens] += 1
            for part in parts_of(event, per_token=per_token):
                self.num_output_tokens += len(part.accepted)
                self.finish_reason = part.finish_reason
                yield part
        elif isinstance(event, Finished) and self.finish_reason is None:
            self.finish_reason = event.reason
            yield Part("", finish_reason=event.reason)

    def whole(self) -> Part:
        """Return all parts of the choice as one, without what belongs to single passes, such as draft tokens and times.

        If a prompt is echoed with log-probabilities, `is_prompt` is True: the first of them has no meaning.
        """
        return Part(
            "".join(part.text for part in self.parts),
            logprobs=tuple(scores for part in self.parts for scores in part.logprobs),
            finish_reason=self.finish_reason,
            is_prompt=any(part.is_prompt and part.logprobs for part in self.parts),
            token_ids=tuple(token_id for part in self.parts for token_id in part.token_ids),
        )
