"""What a grammar does to proposals: cuts them where it refuses them, and lengthens them by what it forces.

A forced token is a draft that costs nothing: there is no choice, so target and draft agree. Drafts get theirs here
without a pass of the draft model, and a pass of the target gets them behind whatever was proposed, or instead of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from inference.errors import SpecDecError
from inference.model import Draft, DraftToken, Matcher, Turn, Verdict

MAX_FORCED_TOKENS = 32
"""Of one pass or step: forced text may be as long as a schema's names, but other sequences share the pass."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the grammar of a turn lets be chosen.

    Attributes:
        masks: one per row that may be committed; None: there is no grammar.
        error: why the grammar cannot go on; what is chosen then must not be committed.
    """

    masks: Sequence[bytes | None] | None = None
    error: SpecDecError | None = None

    def cut(self, verdict: Verdict) -> Verdict:
        """A verdict without tokens of rows that have no mask: what is missing, the next pass chooses, or fails at."""
        if self.masks is None or len(verdict.token_ids) <= len(self.masks):
            return verdict
        num_tokens = len(self.masks)
        return replace(verdict, token_ids=verdict.token_ids[:num_tokens], num_accepted_tokens=num_tokens - 1)


_ANYTHING = Allowed()


def allowed_by_grammar(turn: Turn) -> Allowed:
    """The masks of the rows that verify a turn's proposal."""
    if turn.grammar is None or not turn.chooses:
        return _ANYTHING
    try:
        return Allowed(turn.grammar.masks(turn.token_ids[turn.output_start :], turn.proposal))
    except SpecDecError as exc:
        return Allowed(error=exc)


def fit(turn: Turn) -> Turn:
    """Cut a turn's proposal behind the first token that its grammar refuses, or append forced ones."""
    if turn.grammar is None or not turn.chooses:
        return turn
    try:
        return replace(turn, proposal=_fitting(turn, turn.grammar, turn.token_ids[turn.output_start :]))
    except SpecDecError:  # as `allowed_by_grammar` will say again
        return replace(turn, proposal=())


def _fitting(turn: Turn, grammar: Matcher, output: Sequence[int]) -> list[int]:
    num_allowed = grammar.num_allowed(output, turn.proposal)
    if num_allowed < len(turn.proposal):
        return list(turn.proposal[: num_allowed + 1])  # the refused one stays: its rejection is a verdict on the draft
    room = min(turn.gamma - len(turn.proposal), MAX_FORCED_TOKENS)
    return [*turn.proposal, *grammar.forced([*output, *turn.proposal], room)]


def extend_within_grammar(
    drafts: Sequence[Draft], extend: Callable[[Sequence[Draft]], list[list[T] | None]], token: Callable[[int], T]
) -> list[list[T] | None]:
    """Extend chains: by forced tokens where there are any, by nothing where no token could be right, else by a model.

    Args:
        extend: asks the model.
        token: makes what `extend` gives of a token id.
    """
    if all(draft.grammar is None for draft in drafts):
        return extend(drafts)
    given = [_forced(draft) for draft in drafts]
    asked = [draft for draft, token_ids in zip(drafts, given, strict=True) if token_ids is None]
    answers = iter(extend(asked) if asked else [])
    return [next(answers) if token_ids is None else [token(each) for each in token_ids] for token_ids in given]


def _forced(draft: Draft) -> list[int] | None:
    """The next tokens that need no model; None if it must be asked."""
    if draft.grammar is None:
        return None
    output = draft.token_ids[draft.output_start :]
    if not draft.grammar.goes_on(output):
        return []
    return draft.grammar.forced(output, min(draft.limit, MAX_FORCED_TOKENS)) or None


def asked_model(draft: Draft, tokens: Sequence[DraftToken] | None) -> bool:
    """Whether these tokens cost a pass: those that a grammar forces cost none, and have no runner-up."""
    return draft.grammar is None or (bool(tokens) and tokens is not None and tokens[0].margin < math.inf)


def draft_mask(draft: Draft) -> bytes | None:
    """What a draft's next token may be. A grammar that fails here fails at the target, which says so."""
    if draft.grammar is None:
        return None
    try:
        return draft.grammar.masks(draft.token_ids[draft.output_start :], ())[0]
    except SpecDecError:
        return None


def allowed_part(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """The first tokens of a continuation, as far as the draft's grammar allows them."""
    if draft.grammar is None:
        return list(token_ids)
    return list(token_ids[: draft.grammar.num_allowed(draft.token_ids[draft.output_start :], token_ids)])
