"""Pairs of answers that must be equal: every answer, with the first one to the same prompt by the same model.

Servers have the same model if this comparison has started them, if they report one model_id, or if they are endpoints
and --equal_weights is set.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from specdec.comparison.plan.grid import Sample
from specdec.comparison.plan.record import RequestRecord

Output: TypeAlias = Sequence[int] | str
"""Token ids, or a text."""
Parting: TypeAlias = tuple[int, int | str | None, int | str | None]
"""First difference of two answers: (position, expected token id or character, actual one), None where one has ended."""
OURS = "started here"
"""Name for the model of every server that the comparison has started, in place of its model_id."""


class Pair(NamedTuple):
    """An answer, and its reference: the first answer to the same prompt by a server of the same model."""

    sample: Sample
    record: RequestRecord
    reference: Sample
    expected: RequestRecord

    @property
    def has_tokens(self) -> bool:
        """Return whether both servers send tokens."""
        return bool(self.expected.token_ids and self.record.token_ids)

    @property
    def parting(self) -> Parting | None:
        """First position at which the two answers differ, in tokens if both have them, else in text; None if equal.

        It comes with the values of both at this position; see `Parting`.
        """
        if self.has_tokens:
            return first_difference(self.expected.token_ids, self.record.token_ids)
        return first_difference(self.expected.text, self.record.text)


def pairs(samples: Sequence[Sample], *, equal_weights: bool = False) -> Iterator[Pair]:
    """Yield each comparable answer with its reference, the first answer to its prompt by a server of the same model.

    For prompts of the warm-up the reference is the target alone, if it takes part, since it warms up first.

    Args:
        equal_weights: whether all endpoints have the same weights, according to the user.
    """
    references: dict[tuple[str, str, int], tuple[Sample, RequestRecord]] = {}
    for model, sample, record in _by_model(samples, equal_weights=equal_weights):
        key = model, sample.cell.kind, record.prompt_index
        yield Pair(sample, record, *references.setdefault(key, (sample, record)))


def _by_model(samples: Sequence[Sample], *, equal_weights: bool) -> list[tuple[str, Sample, RequestRecord]]:
    """Return (model, sample, record) of the answers that can be compared; the model is a model_id, or `OURS`.

    These are the answers of servers that the comparison has started, and of models that several ways to serve have.
    """
    answers = [(sample, record) for sample in samples for record in sample.records]
    started = {record.model_id for sample, record in answers if sample.cell.contender.endpoint is None}

    def model_of(sample: Sample, record: RequestRecord) -> str:
        is_ours = sample.cell.contender.endpoint is None or equal_weights
        return OURS if is_ours or (record.model_id and record.model_id in started) else record.model_id

    named = [(model_of(sample, record), sample, record) for sample, record in answers]
    labels: dict[str, set[str]] = defaultdict(set)
    for model, sample, _ in named:
        labels[model].add(sample.cell.contender.label)
    shared = {model for model, sharing in labels.items() if model and (len(sharing) > 1 or model == OURS)}
    return [each for each in named if each[0] in shared]


def first_difference(expected: Output, actual: Output) -> Parting | None:
    """Return the first position at which two answers differ, and both values there; return None if they are equal.

    The value of an answer that has ended before the position is None.
    """
    both: Iterable[tuple[int, tuple[Any, Any]]] = enumerate(itertools.zip_longest(expected, actual))
    return next(((position, *pair) for position, pair in both if pair[0] != pair[1]), None)
