"""Check that every topology gives the same tokens.

Only answers of the same model are compared: of servers that this comparison has started, that report one model_id, or
that --equal_weights declares equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.run.pairs import pairs


@dataclass(frozen=True, slots=True)
class Difference:
    """Answer whose tokens differ from those of the reference, the first answer to the same prompt by the same model.

    Attributes:
        cell, repeat, prompt_index: where the answer comes from: contender and conditions, number of the run, and number
            of the prompt, from 0 on, among those of its kind.
        reference: name of the way to serve that gave the reference.
        position: first difference, in output tokens; in characters if one of the servers sends no tokens.
        expected, actual: token ids or characters there, of the reference and of the answer; None if it has ended there.
        margin: difference in log-probability of the two tokens there; None if it is not known.
    """

    cell: Cell
    repeat: int
    prompt_index: int
    reference: str
    position: int
    expected: int | str | None
    actual: int | str | None
    margin: float | None = None

    def __str__(self) -> str:
        where = f"{self.cell.kind} prompt {self.prompt_index + 1}, output position {self.position}"
        unit = "character" if isinstance(self.expected if self.actual is None else self.actual, str) else "token"
        what = f"{unit} {self.actual!r} where {self.reference} has {self.expected!r}"
        when = f"rtt {self.cell.rtt_ms:g} ms, {self.cell.load}, run {self.repeat + 1}"
        margin = "" if self.margin is None else f", {self.margin:.3g} apart in log-probability"
        return f"{self.cell.contender.label}, {where}: {what}{margin} ({when})"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of the check that all answers of a model to the same prompt have the same tokens.

    Attributes:
        num_requests: number of compared answers.
        differences: differences in the order of measurement, without near-ties.
        near_ties: differences at two tokens whose log-probabilities are so close that rounding may decide.
        not_comparable: names of the ways to serve whose model is not known to be the same as that of another.
        by_text: whether answers of servers that send no tokens were compared by their text.
    """

    num_requests: int
    differences: tuple[Difference, ...]
    not_comparable: tuple[str, ...] = ()
    by_text: bool = False
    near_ties: tuple[Difference, ...] = ()

    @property
    def is_known(self) -> bool:
        """Return whether any answers were compared."""
        return self.num_requests > 0

    @property
    def holds(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        others = f"not comparable, models are not known to be the same: {', '.join(self.not_comparable)}"
        if not self.is_known:
            return others
        how = ", token for token or by their text," if self.by_text else ", token for token,"
        text = f"same tokens: all {self.num_requests} answers agree{how} with the same seed"
        if not self.holds:
            text = f"DIFFERENT TOKENS: {len(self.differences)} of {self.num_requests} answers differ"
        elif self.near_ties:
            text = f"same tokens but for near-ties: {len(self.near_ties)} of {self.num_requests} answers part at one"
        return f"{text}; {others}" if self.not_comparable else text


def check_agreement(samples: Sequence[Sample], *, equal_weights: bool = False, near_tie: float = 0.0) -> Agreement:
    """Compare every answer with its reference, the first answer to the same prompt by the same model.

    Args:
        equal_weights: whether all endpoints have the same weights, according to the user.
        near_tie: difference in log-probability of two tokens up to which answers may part at them, because rounding may
            decide between them; such a difference counts as a near-tie.
    """
    compared = list(pairs(samples, equal_weights=equal_weights))
    found = []
    for pair in compared:
        if (parting := pair.parting) is not None:
            label, record = pair.reference.cell.contender.label, pair.record
            place = pair.sample.cell, pair.sample.repeat, record.prompt_index
            found.append(Difference(*place, label, *parting, record.margin))
    near = tuple(each for each in found if each.margin is not None and each.margin <= near_tie)
    known = {pair.sample.cell.contender.label for pair in compared}
    labels = dict.fromkeys(sample.cell.contender.label for sample in samples)
    others = tuple(label for label in labels if label not in known)
    by_text = any(not pair.has_tokens for pair in compared)
    return Agreement(len(compared), tuple(each for each in found if each not in near), others, by_text, near)
