"""Effect of a grammar on draft tokens: those that it refuses are cut off, and those that it forces are appended.

A forced token is the only one that the grammar allows, so target and draft always agree on it. A draft model's tokens
are continued by forced ones without a pass of that model; a pass of the target verifies forced tokens after the draft
tokens of a proposal, or alone if there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specdec.inference.commit import OwnDrafts
from specdec.inference.errors import SpecDecError
from specdec.inference.model.decoder import Matcher, Turn, Verdict
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.tokens import joined

MAX_FORCED_TOKENS = 32
"""Most forced tokens per pass or step: a schema's names may force more, but other sequences share the pass."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens that a sequence's grammar allows in each row of logits that a pass computes for the sequence.

    Attributes:
        masks: one per row from which a token may be committed, as `Matcher.masks` gives them; None if there is no
            grammar.
        error: why the grammar cannot go on, so that no token may be committed; None if it can.
    """

    masks: Sequence[bytes | None] | None = None
    error: SpecDecError | None = None

    def cut(self, verdict: Verdict) -> Verdict:
        """Return the verdict without the tokens of rows beyond the last mask.

        The next pass chooses them again, or fails by the grammar's error.
        """
        if self.masks is None or len(verdict.token_ids) <= len(self.masks):
            return verdict
        num_tokens = len(self.masks)
        return replace(verdict, token_ids=verdict.token_ids[:num_tokens], num_accepted_tokens=num_tokens - 1)


_ANYTHING = Allowed()


def allowed_by_grammar(turn: Turn) -> Allowed:
    """Return what a turn's grammar allows in the rows that verify its proposal, or the error by which it fails.

    Without a grammar, all tokens are allowed.
    """
    if turn.grammar is None or not turn.chooses or turn.audits:  # an output that is audited may not fit its grammar
        return _ANYTHING
    try:
        return Allowed(turn.grammar.masks(turn.token_ids[turn.output_start :], turn.proposal))
    except SpecDecError as exc:
        return Allowed(error=exc)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Part of one sequence in a pass (`Turn`), with the proposal that is verified and the sources of its tokens.

    Attributes:
        turn: the turn.
        refused: the first draft token that the grammar refuses, which counts as rejected without a pass; empty if it
            refuses none.
        num_forced: number of tokens at the proposal's end that the grammar forces.
        is_lookup: True if the proposal's tokens before the forced ones come from prompt lookup.
    """

    turn: Turn
    refused: Sequence[int] = ()
    num_forced: int = 0
    is_lookup: bool = False

    def counted(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the refused token counted, and with separate counts for lookup and forced tokens."""
        if not (self.refused or self.num_forced or self.is_lookup):
            return verdict
        num_others = len(self.turn.proposal) - self.num_forced
        num_accepted = min(verdict.num_accepted_tokens, num_others)
        num_forced_accepted = verdict.num_accepted_tokens - num_accepted
        looked_up = (num_others + len(self.refused), num_accepted) if self.is_lookup else (0, 0)
        own = OwnDrafts(*looked_up, self.num_forced, num_forced_accepted)
        num_draft_tokens = verdict.num_draft_tokens + len(self.refused)
        rejected = (*verdict.rejected_token_ids, *self.refused)
        return replace(verdict, num_draft_tokens=num_draft_tokens, own=own, rejected_token_ids=rejected)


def fit(turn: Turn) -> Fitted:
    """Return a turn with the proposal that its pass verifies.

    It is the turn's own proposal, or the one from prompt lookup if that is empty. Tokens that the grammar refuses are
    cut off, and tokens that the grammar forces are appended.
    """
    is_lookup = turn.chooses and not turn.proposal and bool(turn.lookup)
    turn = replace(turn, proposal=turn.lookup) if is_lookup else turn
    if turn.grammar is None or not turn.chooses or turn.audits:
        return Fitted(turn, is_lookup=is_lookup)
    try:
        return _fitted(turn, turn.grammar, is_lookup)
    except SpecDecError:  # `allowed_by_grammar` will report it
        return Fitted(replace(turn, proposal=()))


def _fitted(turn: Turn, grammar: Matcher, is_lookup: bool) -> Fitted:
    output = turn.token_ids[turn.output_start :]
    num_allowed = grammar.num_allowed(output, turn.proposal)
    kept = turn.proposal[:num_allowed]
    forced = grammar.forced(joined(output, kept), min(turn.gamma - len(kept), MAX_FORCED_TOKENS))
    refused = turn.proposal[num_allowed : num_allowed + 1]
    return Fitted(replace(turn, proposal=[*kept, *forced]), refused, len(forced), is_lookup)


def extend_within_grammar(
    drafts: Sequence[Draft], extend: Callable[[Sequence[Draft]], list[list[DraftToken] | None]]
) -> list[list[DraftToken] | None]:
    """Extend chains of draft tokens: by tokens that a grammar forces if there are any, else by a model.

    Args:
        drafts: the chains.
        extend: function that extends chains by the model; it gets those without forced tokens.

    Returns:
        Per chain, its next tokens: none if its grammar has ended, None if the model only read a part of a prompt.
    """
    if all(draft.grammar is None for draft in drafts):
        return extend(drafts)
    given = [_forced(draft) for draft in drafts]
    asked = [draft for draft, tokens in zip(drafts, given, strict=True) if tokens is None]
    answers = iter(extend(asked) if asked else [])
    return [next(answers) if tokens is None else tokens for tokens in given]


def _forced(draft: Draft) -> list[DraftToken] | None:
    """Return the tokens that a chain's grammar forces; [] if the grammar has ended, None if the model must choose."""
    if draft.grammar is None:
        return None
    output = draft.token_ids[draft.output_start :]
    if not draft.grammar.goes_on(output):
        return []
    forced = draft.grammar.forced(output, min(draft.limit, MAX_FORCED_TOKENS))
    return [DraftToken(token_id, is_forced=True) for token_id in forced] or None


def was_step(extensions: Sequence[Sequence[DraftToken] | None]) -> bool:
    """Return whether the time of a step with these results shows what drafting costs.

    It does if the step read no prompt, and a model or lookup chose some token, so that not all were forced.
    """
    return None not in extensions and any(tokens and not tokens[0].is_forced for tokens in extensions)


def draft_mask(draft: Draft) -> bytes | None:
    """Return the mask of the tokens that may follow a chain; None if any may.

    None is also returned if the grammar fails, since it fails at the target as well.
    """
    if draft.grammar is None:
        return None
    try:
        return draft.grammar.masks(draft.token_ids[draft.output_start :], ())[0]
    except SpecDecError:
        return None


def allowed_part(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """Return the tokens proposed after a chain that come before the first one that the chain's grammar refuses."""
    if draft.grammar is None:
        return list(token_ids)
    return list(token_ids[: draft.grammar.num_allowed(draft.token_ids[draft.output_start :], token_ids)])
