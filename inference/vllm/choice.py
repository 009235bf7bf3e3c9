"""Our choice in vLLM's workers: bias, penalties, minimum length, grammar and noise, as in our own engine.

Knows requests by vLLM's ids, and nothing of its runners: a module per runner asks for the tokens that win its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.model.decoder import Turn
from specdec.inference.model.slots import Array
from specdec.inference.speculation.grammar import Allowed, allowed_by_grammar
from specdec.inference.speculation.slot_decoder import choose, rows_not_finite
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.tokens import Tally, TokenView
from specdec.inference.vllm.translation import Asked

KEPT = 64
"""Most requests kept after the runner has dropped them, before all of these are forgotten."""


@dataclass(slots=True)
class _Request:
    """Request with counts of its tokens for penalties; its tokens only grow, so that each is counted once."""

    asked: Asked
    token_ids: list[int]
    tally: Tally
    matcher: GrammarMatcher | None


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one request in a pass: one after its tokens, and one after each token of the proposal.

    Attributes:
        name: vLLM's id of the request.
        token_ids: the request's tokens so far.
        extra_args: the request's `extra_args` in vLLM.
    """

    name: str
    token_ids: Sequence[int]
    proposal: Sequence[int]
    extra_args: dict[str, object] | None


def names_not_finite(logits: Array, names: Sequence[str], num_rows: Sequence[int]) -> list[str]:
    """Return the names of the requests with logits that are not finite; each has some rows, one request after another.

    Args:
        logits: float [sum of num_rows, vocab_size].
    """
    owners = [name for name, number in zip(names, num_rows, strict=True) for _ in range(number)]
    return [owners[row] for row in rows_not_finite(logits)]


class Choice:
    """Choice of tokens for the requests of one worker.

    Args:
        model: directory of the model, whose tokenizer grammars need; it is loaded at the first one.
    """

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._requests: dict[str, _Request | None] = {}

    def winners(self, spans: Sequence[Span], rows_of: Callable[[Sequence[int]], Array]) -> list[Winners]:
        """Return the winners of the spans that want our choice; those of others are vLLM's own.

        Args:
            rows_of: returns the logits of some of the spans, by their places: float [num_rows, vocab_size].
        """
        turns = {place: turn for place, span in enumerate(spans) if (turn := self._turn(span)) is not None}
        if not turns:
            return []
        judged = [(turn, allowed_by_grammar(turn)) for turn in turns.values()]
        chosen = iter(choose(rows_of(list(turns)), judged))
        return [
            self._winners(place, allowed, [next(chosen) for _ in range(len(turn.proposal) + 1)])
            for place, (turn, allowed) in zip(turns, judged, strict=True)
        ]

    def _winners(self, place: int, allowed: Allowed, token_ids: list[int]) -> Winners:
        """Return the winners of a span; if its grammar fails, an end: the front then finds the output refused."""
        if allowed.error is not None:
            return Winners(place, [min(self._grammars().eos_token_ids)] * len(token_ids), None)
        return Winners(place, token_ids, None if allowed.masks is None else len(allowed.masks))

    def forget(self, names: set[str]) -> None:
        """Forget all requests but these, once there are many others."""
        if len(self._requests) > len(names) + KEPT:
            self._requests = {name: each for name, each in self._requests.items() if name in names}

    def _turn(self, span: Span) -> Turn | None:
        if span.name not in self._requests:
            self._requests[span.name] = self._request(span)
        if (request := self._requests[span.name]) is None:
            return None
        request.token_ids.extend(span.token_ids[len(request.token_ids) :])
        return Turn(
            slot=0,
            start=0,
            token_ids=TokenView(request.token_ids),
            sampling=request.asked.sampling,
            proposal=span.proposal,
            output_start=request.asked.output_start,
            grammar=request.matcher,
            tally=request.tally,
        )

    def _request(self, span: Span) -> _Request | None:
        asked = Asked.read(span.extra_args)
        if asked is None:
            return None
        matcher = None if asked.grammar is None else self._grammars().another(asked.grammar)
        return _Request(asked, [], Tally(asked.output_start), matcher)

    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(Tokenizer.load(self._model), self._vocab_size)
        return self._compiler


@dataclass(frozen=True, slots=True)
class Winners:
    """Tokens that win the rows of a span.

    Attributes:
        place: place of the span.
        num_judged: number of first rows that the grammar has judged; no token of a later one may be committed.
    """

    place: int
    token_ids: Sequence[int]
    num_judged: int | None
