"""Choice of tokens in vLLM's workers: bias, penalties, minimum length, grammar and noise, as in this project's engine.

Knows requests by vLLM's ids, and no runner: a module per runner asks for the token of each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.inference.model.decoder import Turn
from specdec.inference.model.slots import Array
from specdec.inference.speculation.grammar import Allowed, allowed_by_grammar
from specdec.inference.speculation.slot_decoder import choose, rows_not_finite
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.tokens import Tally, TokenView
from specdec.inference.vllm.translation import Asked

KEPT = 64
"""Most requests whose state is kept although the runner has dropped them; one more, and all of these are forgotten."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of logits of one request in a pass: one after its tokens, and one after each token of its proposal.

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
    """Return, for each row of logits that is not finite, the name of the request that it belongs to.

    Args:
        logits: float [sum of num_rows, vocab_size]: the rows of one request after another.
        num_rows: number of rows of each request in `names`.
    """
    if not (broken := rows_not_finite(logits)):
        return []
    owners = [name for name, number in zip(names, num_rows, strict=True) for _ in range(number)]
    return [owners[row] for row in broken]


class Choice:
    """Choice of tokens for the requests of one worker.

    Args:
        model: directory of the model, from which a thread loads the tokenizer for grammars: within a pass, at the first
            request with one, all others would wait for it.
    """

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._compiler = ThreadPoolExecutor(1).submit(_compiler_of, model, vocab_size)
        self._requests: dict[str, tuple[list[int], Turn] | None] = {}  # tokens, and a turn without any; None: not ours

    def winners(self, spans: Sequence[Span], rows_of: Callable[[Sequence[int]], Array]) -> list[Winners]:
        """Choose a token for each row of the spans whose requests this project samples; vLLM samples the others.

        Args:
            rows_of: returns the logits of the spans at the given indices into `spans`: float [num_rows, vocab_size].
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
        """Return the tokens chosen for the span at index `place` of the pass.

        If the request's grammar fails at a row, an end-of-sequence token replaces the tokens from there on. By that
        token the front sees the failure.
        """
        num_judged = 0 if allowed.error is not None else len(token_ids if allowed.masks is None else allowed.masks)
        if num_judged < len(token_ids):
            end = min(self._grammars().eos_token_ids)
            return Winners(place, [*token_ids[:num_judged], *[end] * (len(token_ids) - num_judged)])
        return Winners(place, token_ids)

    def forget(self, names: Collection[str]) -> None:
        """Drop the state of all requests but `names`, once more than `KEPT` others are kept."""
        if len(self._requests) > len(names) + KEPT:
            self._requests = {name: each for name, each in self._requests.items() if name in names}

    def _turn(self, span: Span) -> Turn | None:
        if span.name not in self._requests:
            self._requests[span.name] = self._request(span)
        if (request := self._requests[span.name]) is None:
            return None
        token_ids, turn = request
        token_ids.extend(span.token_ids[len(token_ids) :])  # they only grow, so that the tally counts each once
        return replace(turn, token_ids=TokenView(token_ids), proposal=span.proposal)

    def _request(self, span: Span) -> tuple[list[int], Turn] | None:
        asked = Asked.read(span.extra_args)
        if asked is None:
            return None
        sampling, start = asked.sampling, asked.output_start
        matcher = None if asked.grammar is None else self._grammars().another(asked.grammar)
        return [], Turn(0, 0, (), sampling, output_start=start, grammar=matcher, tally=Tally(start))

    def _grammars(self) -> GrammarCompiler:
        return self._compiler.result()


def _compiler_of(model: Path, vocab_size: int) -> GrammarCompiler:
    compiler = GrammarCompiler(Tokenizer.load(model), vocab_size)
    compiler.warm_up()
    return compiler


@dataclass(frozen=True, slots=True)
class Winners:
    """Tokens chosen for the rows of one span; `place` is the span's index in the pass."""

    place: int
    token_ids: Sequence[int]


def crown(logits: Any, winners: Sequence[tuple[int, int]]) -> Any:
    """Force one token in some rows of logits: its logit becomes 0 and all others minus infinity, in place.

    Args:
        logits: float [num_rows, vocab_size].
        winners: (row, token id) of each row to change; all other rows stay as they are.
    """
    if winners:
        rows, token_ids = (list(column) for column in zip(*winners, strict=True))
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
    return logits
