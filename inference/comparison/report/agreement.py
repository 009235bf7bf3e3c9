"""The one promise every topology makes: the same tokens. Finds where it is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.comparison.plan.grid import Sample


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the reference's.

    Attributes:
        contender, reference: whose answers differ.
        kind, prompt_index: the prompt; the index counts from 0 within its kind.
        position: of the first difference, in output tokens.
        expected, actual: token ids there; None where an answer has ended.
    """

    contender: str
    reference: str
    kind: str
    prompt_index: int
    rtt_ms: float
    load: str
    repeat: int
    position: int
    expected: int | None
    actual: int | None

    def __str__(self) -> str:
        where = f"{self.kind} prompt {self.prompt_index + 1}, output position {self.position}"
        what = f"token {self.actual} where {self.reference} has {self.expected}"
        when = f"rtt {self.rtt_ms:g} ms, {self.load}, run {self.repeat + 1}"
        return f"{self.contender}, {where}: {what} ({when})"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether all answers were the same.

    Attributes:
        num_requests: how many were compared.
        differences: in the order in which they were measured.
    """

    num_requests: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.holds:
            return f"same tokens: all {self.num_requests} answers agree, token for token, with the same seed"
        return f"DIFFERENT TOKENS: {len(self.differences)} of {self.num_requests} answers differ"


def check_agreement(samples: Sequence[Sample]) -> Agreement:
    """Compare every answer with the first one to the same prompt; the target alone is measured first."""
    references: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    differences = []
    for sample in samples:
        label = sample.cell.contender.label
        for record in sample.records:
            key = sample.cell.kind, record.prompt_index
            reference, expected = references.setdefault(key, (label, record.token_ids))
            position = first_difference(expected, record.token_ids)
            if position is not None:
                differences.append(_difference(sample, record.prompt_index, reference, expected, record.token_ids))
    return Agreement(sum(len(sample.records) for sample in samples), tuple(differences))


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one has; None if there is none."""
    for position, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if left != right:
            return position
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def _difference(
    sample: Sample, prompt_index: int, reference: str, expected: Sequence[int], actual: Sequence[int]
) -> Difference:
    position = first_difference(expected, actual)
    if position is None:
        raise ValueError("the answers do not differ")
    return Difference(
        contender=sample.cell.contender.label,
        reference=reference,
        kind=sample.cell.kind,
        prompt_index=prompt_index,
        rtt_ms=sample.cell.rtt_ms,
        load=sample.cell.load,
        repeat=sample.repeat,
        position=position,
        expected=_at(expected, position),
        actual=_at(actual, position),
    )


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
