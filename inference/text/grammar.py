"""Grammars over a tokenizer's tokens: compiled by llguidance, followed by a matcher. Knows no model and no noise.

It stands with text and not with sampling, because a grammar speaks of text and only the tokenizer knows which tokens
write it; sampling sees nothing of it but a mask. What is not the library's is decided here: that an end-of-sequence
token may follow where the grammar is complete, and nothing after it. The masks are part of the law of a request's
tokens, so `grammar_source.VERSION` names all that they depend on beside the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.errors import InternalError, InvalidRequestError
from inference.request import Grammar, GrammarKind
from inference.text.grammar_source import LIMITS, brief, source_of
from inference.text.schema_fault import path_of_fault
from inference.text.tokenizer import Tokenizer
from inference.tokens import common_length, joined

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarCompiler:
    """Compiles grammars for one model. Calls take up to a tenth of a second, or so: keep them off the event loop.

    Args:
        tokenizer: of the model; its end-of-sequence ids end an output.
        vocab_size: rows of the model's output layer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._words: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an output; its first mask is made already, which is where most work is.

        Raises:
            InvalidRequestError: the grammar has a fault, or is too complex.
        """
        eos = self._eos_token_ids()
        try:
            matcher = self._matcher(source_of(grammar), eos)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            compiled = GrammarMatcher(matcher, eos, lambda: self._matcher(source_of(grammar), eos))
            compiled.masks((), ())
        except (ValueError, RecursionError) as exc:
            path = self._path(grammar, eos)
            message = f"{grammar.kind.value}: {path and f'{path}: '}{brief(str(exc))}"
            raise InvalidRequestError(message, field="grammar") from exc
        return compiled

    def _matcher(self, source: str, eos: frozenset[int]) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        return LLMatcher(self._llg_words(eos), source, log_level=0, limits=limits)

    def _path(self, grammar: Grammar, eos: frozenset[int]) -> str:
        """Where the fault of a schema is; empty if there is no telling."""
        if grammar.kind is not GrammarKind.JSON_SCHEMA:
            return ""

        def message_of(schema: Any) -> str:
            return self._matcher(source_of(replace(grammar, text=json.dumps(schema))), eos).get_error()

        try:
            return path_of_fault(json.loads(grammar.text), message_of)
        except (ValueError, RecursionError, InvalidRequestError):  # no JSON, or too much of it
            return ""

    def _eos_token_ids(self) -> frozenset[int]:
        eos = frozenset(each for each in self._tokenizer.eos_token_ids if each < self._vocab_size)
        if not eos:
            raise InvalidRequestError("grammar: the model has no end-of-sequence token to end it with", field="grammar")
        return eos

    def _llg_words(self, eos: frozenset[int]) -> LLTokenizer:
        """Made at the first grammar: servers that see none pay nothing."""
        if self._words is None:
            from llguidance import LLTokenizer

            self._words = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(eos))
        return self._words


class _LimitError(Exception):
    """The library gave up on a sequence, also when it saw nothing but that."""


class GrammarMatcher:
    """The `inference.model.Matcher` of one sequence: goes on from the longest prefix that it still holds.

    The library's limits count all that a matcher ever saw, refused drafts among it, and its errors stay. So a matcher
    with an error is made anew and shown the sequence alone: no draft can fail a request. A copy would not do: the
    library's copies share their states, and behind an error refuse everything without a word.

    Args:
        matcher: at the beginning of an output.
        eos_token_ids: may end it.
        remake: compiles the grammar again.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], remake: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._remake = remake
        self._held: Sequence[int] = ()
        self._fault = ""

    def num_allowed(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        """See `Matcher`."""
        self._reach(output)
        num_taken = self._num_taken(output, proposal)
        if num_taken == len(proposal) or not self._may_end(proposal[num_taken]):
            return num_taken
        return num_taken + 1

    def masks(self, output: Sequence[int], proposal: Sequence[int]) -> list[bytes | None]:
        """See `Matcher`."""
        self._reach(output)
        masks: list[bytes | None] = [self._first_mask(output)]
        with suppress(_LimitError):
            while len(masks) <= len(proposal):
                mask = self._mask(joined(output, proposal[: len(masks)]))
                if mask is None:
                    return masks + [None] * (len(proposal) + 1 - len(masks))
                masks.append(mask)
        return masks

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """See `Matcher`."""
        if limit <= 0 or not self.goes_on(output):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if len(tokens) < limit and len(self._eos) == 1 and self.goes_on(joined(output, tokens)):
            tokens += self._eos if self._matcher.is_stopped() else ()
        return tokens

    def goes_on(self, output: Sequence[int]) -> bool:
        """See `Matcher`."""
        try:
            return self._go_to(output) == len(output)
        except _LimitError:
            return False

    def _reach(self, output: Sequence[int]) -> None:
        try:
            num_taken = self._go_to(output)
        except _LimitError:
            raise self._too_complex() from None
        if num_taken < len(output):
            token_id = output[num_taken]
            raise InternalError(f"the grammar refuses token {token_id} of the output, which it had allowed")

    def _num_taken(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        with suppress(_LimitError):
            return self._go_to(joined(output, proposal)) - len(output)
        num_taken = 0  # one by one, to the token at which the limit is
        with suppress(_LimitError):
            while self._go_to(joined(output, proposal[: num_taken + 1])) > len(output) + num_taken:
                num_taken += 1
        self._reach(joined(output, proposal[:num_taken]))
        return num_taken

    def _go_to(self, tokens: Sequence[int]) -> int:
        """Stand behind as many of the tokens as the grammar takes, end-of-sequence ones not among them; how many."""
        for _ in range(2):
            num_taken = self._advance(tokens)
            if not self._has_error():
                return num_taken
        raise _LimitError

    def _advance(self, tokens: Sequence[int]) -> int:
        common = common_length(self._held, tokens)
        if common < len(self._held):
            self._matcher.rollback(len(self._held) - common)
        rest = [*tokens[common:]]
        end = next((i for i, token_id in enumerate(rest) if token_id in self._eos), len(rest))
        num_taken: int = common + self._matcher.try_consume_tokens(rest[:end])
        self._held = tokens[:num_taken]
        return num_taken

    def _may_end(self, token_id: int) -> bool:
        return token_id in self._eos and self._matcher.is_accepting()

    def _first_mask(self, output: Sequence[int]) -> bytes | None:
        try:
            return self._mask(output)
        except _LimitError:
            raise self._too_complex() from None

    def _mask(self, tokens: Sequence[int]) -> bytes | None:
        """What may follow the tokens; None if they are refused or ended."""
        for _ in range(2):
            if self._go_to(tokens) < len(tokens):
                return None
            mask: bytes = self._matcher.compute_bitmask()
            if not self._has_error():
                return mask
        raise _LimitError

    def _has_error(self) -> bool:
        """Whether the library gave up; then the matcher is a new one."""
        if not self._matcher.is_error():
            return False
        self._fault = self._matcher.get_error()
        self._matcher, self._held = self._remake(), ()
        return True

    def _too_complex(self) -> InvalidRequestError:
        """That the grammar has no other fault, its compilation said."""
        return InvalidRequestError(f"grammar: {brief(self._fault)}", field="grammar")
