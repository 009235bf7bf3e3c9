"""Detokenization of an answer, in the server with the model or in the process of a client that has a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter

from specdec.inference.commit import Commit, Delta, Finished, FinishReason, TextEvent, TokenLogprobs
from specdec.inference.errors import InvalidRequestError
from specdec.inference.text.chat import Chat
from specdec.inference.text.stop_strings import StopStrings
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completion import Completer, CompletionRequest, Resume

REPLAY_TOKENS = 256
"""Number of tokens of a resumed output that are detokenized in a few milliseconds, before the event loop's other tasks
have a turn."""
_fields_of = attrgetter(*(each.name for each in fields(Commit)))  # with which a Delta begins, too


class TextCompleter:
    """`Completer` that asks another completer for token ids, and detokenizes them, so that the target need not.

    If this process has no tokenizer that makes the same text as the target's, the target detokenizes.

    Args:
        completer: completer that gives the token ids.
        tokenizer: function that returns a tokenizer which makes the same text from token ids as the tokenizer of the
            model that is served now; it returns None if this process has none.
    """

    def __init__(self, completer: Completer, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._completer = completer
        self._tokenizer = tokenizer

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the events of the other completer's answer, with the text of their tokens.

        If a stop string ends the text, the request to the other completer is cancelled.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None or request.ids_only or request.max_new_tokens == 0:
            text = None
        else:
            text = Text(tokenizer, request)
            await text.replay(request.resume)
            request = replace(request, stop=(), ids_only=True)
        async with aclosing(self._completer.complete(request)) as events:
            async for event in events:
                if text is not None and isinstance(event, Delta):
                    event = text.delta(event)
                    if not (event.token_ids or event.text or event.finish_reason is not None):
                        continue
                yield event
                if isinstance(event, Delta) and event.finish_reason is not None:
                    yield Finished(event.finish_reason)
                    return


class Text:
    """Detokenizer of one request's output, which cuts the text at the first stop string.

    For a request with `ids_only`, the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        self._stream = tokenizer.stream(tokenizer.shown_markers(calls=bool(chat.tools_json)) if chat else {})
        self._stops = StopStrings(request.stop)
        self._is_empty = request.ids_only

    async def replay(self, resume: Resume | None) -> None:
        """Detokenize the output tokens that another server committed, so that the text can continue after them.

        Other tasks of the event loop run in between. If `resume` is None, do nothing.

        Raises:
            InvalidRequestError: a stop string is among these tokens, so that nothing can follow.
        """
        if resume is None or self._is_empty:
            return
        for start in range(0, len(resume.token_ids), REPLAY_TOKENS):
            self._pieces(resume.token_ids[start : start + REPLAY_TOKENS])
            await asyncio.sleep(0)
        check_rest(resume, "a stop string is among them" if self._stops.found else "")

    def delta(self, commit: Commit) -> Delta:
        """Return a commit (the tokens that became final in one target pass) with the text of its tokens.

        If a stop string is completed, the tokens after it are dropped, and the text ends before it.
        """
        if self._is_empty:
            return Delta(*_fields_of(commit))
        pieces, lengths = self._pieces(commit.token_ids)
        rest = self._rest() if commit.finish_reason is not None else ""
        if pieces:
            pieces[-1] += rest
        if len(pieces) < len(commit.token_ids):
            commit = _first(commit, len(pieces))
        if self._stops.found:
            commit = replace(commit, finish_reason=FinishReason.STOP)
        if commit.logprobs:
            named = map(partial(with_text, self._tokenizer), commit.logprobs, lengths)
            commit = replace(commit, logprobs=tuple(named))
        rejected = self._tokenizer.text_of(commit.rejected_token_ids)
        if rejected:
            commit = replace(commit, rejected_token_ids=())
        written = "".join(pieces) or rest, tuple(map(len, pieces)), rejected
        return Delta(*(*_fields_of(commit), *written))

    def _pieces(self, token_ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text that each token adds, and the number of characters that each token adds.

        If a token completes a stop string, both lists end with this token. The numbers include characters that may
        begin a stop string; the texts get these characters only with a later token, which decides it.
        """
        pieces: list[str] = []
        lengths: list[int] = []
        for token_id in token_ids:
            text = self._stream.push(token_id)
            pieces.append(self._stops.push(text))
            lengths.append(len(text))
            if self._stops.found:
                break
        return pieces, lengths

    def _rest(self) -> str:
        """Return, at the end of the output, the text that was kept since it might have begun a stop string."""
        return "" if self._stops.found else self._stops.push(self._stream.rest()) + self._stops.rest()


def _first(commit: Commit, num_tokens: int) -> Commit:
    """Return a commit (the tokens that became final in one target pass), cut to its first `num_tokens` tokens.

    Draft tokens behind the cut count neither as accepted nor as rejected, like those behind a stop token.
    """
    return replace(
        commit,
        token_ids=commit.token_ids[:num_tokens],
        num_draft_tokens=min(commit.num_draft_tokens, num_tokens),
        num_accepted_tokens=min(commit.num_accepted_tokens, num_tokens),
        own=commit.own.cut(num_tokens, commit.num_accepted_tokens),
        rejected_token_ids=(),
    )


def with_text(tokenizer: Tokenizer, logprobs: TokenLogprobs, num_characters: int) -> TokenLogprobs:
    """Return a position's log-probabilities with two additions: the bytes of the tokens, and `num_characters`."""
    return replace(logprobs, texts=tuple(map(tokenizer.token_bytes, logprobs.token_ids)), num_characters=num_characters)


def check_rest(resume: Resume, why_none: str) -> None:
    """Check that a resumed output can go on.

    Raises:
        InvalidRequestError: nothing can follow, for the reason `why_none`; if that is empty, nothing is raised.
    """
    if why_none:
        message = f"committed_token_ids: nothing more can follow these {len(resume.token_ids)}: {why_none}"
        raise InvalidRequestError(message, field="committed_token_ids")
