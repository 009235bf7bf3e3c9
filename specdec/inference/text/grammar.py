"""Grammars over the tokens of a tokenizer: llguidance compiles them, and a matcher follows each output.

A grammar describes text, and only the tokenizer knows which tokens write it; sampling gets nothing but masks of tokens.
One rule is added to the library's: where a text is complete by the grammar, an end-of-sequence token may follow, and
nothing after it. Masks also depend on versions, which `grammar_source.grammar_version` names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from specdec.inference.errors import InternalError, InvalidRequestError
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.grammar_source import brief, parser_limits, source_of, with_tokens
from specdec.inference.text.grammar_trial import try_out
from specdec.inference.text.grammar_words import words_of
from specdec.inference.text.schema_fault import fault_of_schema
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.tokens import common_length, joined

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarCompiler:
    """Compiler of grammars for the tokens of one model. Its methods may take seconds, so they are to run in a thread.

    Args:
        tokenizer: tokenizer of the model; its end-of-sequence ids end an output.
        vocab_size: number of rows of the model's output layer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(each for each in tokenizer.eos_token_ids if each < vocab_size)

    def warm_up(self) -> None:
        """Make llguidance's tokenizer now, which takes up to some seconds for a large vocabulary."""
        if self.eos_token_ids:
            _ = self._words

    def compile(self, grammar: Grammar, is_awaited: Callable[[], bool] = lambda: False) -> GrammarMatcher:
        """Return a matcher of a grammar, which is at the beginning of an output.

        It has already computed the mask of the tokens that may come first, which is most of the work.

        Args:
            is_awaited: function that returns whether other requests wait for this call to end.

        Raises:
            InvalidRequestError: the grammar has a fault, or is too complex.
            CapacityError: its trial compilation was ended because other requests wait.
            InternalError: its trial compilation failed for another reason, which is not the grammar's fault.
        """
        if not self.eos_token_ids:
            raise InvalidRequestError("grammar: the model has no end-of-sequence token to end it with", field="grammar")
        try:
            try_out(source_of(grammar), is_awaited)
            matcher = self._matcher(grammar)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            compiled = GrammarMatcher(matcher, self.eos_token_ids, lambda: self._matcher(grammar))
            compiled.masks((), ())
        except (ValueError, RecursionError) as exc:
            path = _path(grammar)
            message = f"{grammar.kind.value}: {path and f'{path}: '}{brief(str(exc))}"
            raise InvalidRequestError(message, field="grammar") from exc
        return compiled

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._words, self.source(grammar), log_level=0, limits=parser_limits())

    def source(self, grammar: Grammar) -> str:
        """Return a grammar that `compile` has accepted in the form that the library llguidance takes.

        Markers in it, such as <think>, may also be written by this tokenizer's tokens for them.
        """
        return with_tokens(source_of(grammar), self._tokenizer.markers)

    @cached_property
    def _words(self) -> LLTokenizer:
        """Return llguidance's tokenizer over the model's tokens, which is made when it is first needed."""
        num_ids = max(self._vocab_size, self._tokenizer.num_ids)  # of Gemma 3, small models lack the last id
        return words_of(self._tokenizer, num_ids, self.eos_token_ids)


def _path(grammar: Grammar) -> str:
    """Return the path to the fault in a grammar that is a JSON schema; empty for others, or if it is not found."""
    try:
        return fault_of_schema(json.loads(grammar.text))[0] if grammar.kind is GrammarKind.JSON_SCHEMA else ""
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return ""


class GrammarMatcher:
    """Follower of a grammar along one sequence of output tokens, which gives masks of the tokens that may come next.

    It implements `Matcher` (inference/model/decoder.py). Each call takes the tokens from the beginning of the output,
    and starts where they differ from those of the call before. llguidance's limits count all tokens that one of its
    matchers ever saw, rejected drafts included, and its errors are final. So after an error a new matcher is made,
    which sees only the sequence, and no draft can fail a request. A copy of a matcher would not do: copies share their
    states, and after an error they refuse everything without a message.

    Args:
        matcher: llguidance's matcher, at the beginning of an output.
        eos_token_ids: tokens that may end the output.
        remake: function that compiles the grammar again.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], remake: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._remake = remake
        self._held: Sequence[int] | None = ()  # None: unknown, so that the matcher cannot be used any more
        self._fault = ""

    def num_allowed(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        """Return how many of the proposal's first tokens the grammar accepts after the output."""
        self._reach(output)
        num_taken = self._num_taken(output, proposal)
        if num_taken == len(proposal) or not self._may_end(proposal[num_taken]):
            return num_taken
        return num_taken + 1

    def masks(self, output: Sequence[int], proposal: Sequence[int]) -> list[bytes | None]:
        """Return the mask of allowed tokens for each of the len(proposal) + 1 rows of logits that verify a proposal.

        A mask has one bit per token id, the lowest bit of the first byte first; 1 allows the token. Rows after a token
        that the grammar refuses, or that ends the output, have None. The list ends where the matcher's limits are
        exceeded.
        """
        self._reach(output)
        masks: list[bytes | None] = [self._mask(output)]
        with suppress(InvalidRequestError):
            while len(masks) <= len(proposal):
                mask = self._mask(joined(output, proposal[: len(masks)]))
                if mask is None:
                    return masks + [None] * (len(proposal) + 1 - len(masks))
                masks.append(mask)
        return masks

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` next tokens for which the grammar leaves no choice; empty if the next is not certain."""
        if limit <= 0 or not self.goes_on(output):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if len(tokens) < limit and len(self._eos) == 1 and self.goes_on(joined(output, tokens)):
            tokens += self._eos if self._matcher.is_stopped() else ()
        return tokens

    def goes_on(self, output: Sequence[int]) -> bool:
        """Return whether the grammar allows this output, and a further token after it."""
        try:
            return self._go_to(output) == len(output)
        except InvalidRequestError:
            return False

    def _reach(self, output: Sequence[int]) -> None:
        num_taken = self._go_to(output)
        if num_taken < len(output):
            token_id = output[num_taken]
            raise InternalError(f"the grammar refuses token {token_id} of the output, which it had allowed")

    def _num_taken(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        with suppress(InvalidRequestError):
            return self._go_to(joined(output, proposal)) - len(output)
        num_taken = 0  # token by token, up to the one that exceeds the limit
        with suppress(InvalidRequestError):
            while self._go_to(joined(output, proposal[: num_taken + 1])) > len(output) + num_taken:
                num_taken += 1
        self._reach(joined(output, proposal[:num_taken]))
        return num_taken

    def _go_to(self, tokens: Sequence[int]) -> int:
        """Move the matcher along `tokens`, up to one that is refused or ends the output.

        Return the number of tokens before that one, or of all tokens if there is none.

        Raises:
            InvalidRequestError: even a new matcher exceeds llguidance's limits at these tokens.
        """
        for _ in range(2):
            num_taken = self._advance(tokens)
            if not self._has_error():
                return num_taken
        raise self._too_complex()

    def _advance(self, tokens: Sequence[int]) -> int:
        if self._held is None:
            self._matcher, self._held = self._remake(), ()
        held, self._held = self._held, None  # until it is known: after an error within, the matcher may be anywhere
        common = common_length(held, tokens)
        if common < len(held):
            self._matcher.rollback(len(held) - common)
        rest = [*tokens[common:]]
        end = next((i for i, token_id in enumerate(rest) if token_id in self._eos), len(rest))
        num_taken: int = common + self._matcher.try_consume_tokens(rest[:end])
        self._held = tokens[:num_taken]
        return num_taken

    def _may_end(self, token_id: int) -> bool:
        return token_id in self._eos and self._matcher.is_accepting()

    def _mask(self, tokens: Sequence[int]) -> bytes | None:
        """Return the mask of the tokens that may follow `tokens`; None if these are refused, or end the output.

        Raises:
            InvalidRequestError: even a new matcher exceeds llguidance's limits.
        """
        for _ in range(2):
            if self._go_to(tokens) < len(tokens):
                return None
            mask: bytes = self._matcher.compute_bitmask()
            if not self._has_error():
                return mask
        raise self._too_complex()

    def _has_error(self) -> bool:
        """Return whether llguidance's matcher has failed; if so, note the error, and that a new one must be made."""
        if not self._matcher.is_error():
            return False
        self._fault, self._held = self._matcher.get_error(), None
        return True

    def _too_complex(self) -> InvalidRequestError:
        """Return the error for an exceeded limit of llguidance, the only fault that a compiled grammar can have."""
        return InvalidRequestError(f"grammar: {brief(self._fault)}", field="grammar")
