"""What those are told who find no place."""

from __future__ import annotations

import pytest

from inference.engine.admission import Admission
from inference.errors import CapacityError


class Visitor:
    slot: int | None = None

    def enter(self, slot: int) -> None:
        self.slot = slot


def test_not_all_are_told_to_come_back_at_one_time() -> None:
    admission: Admission[Visitor] = Admission(num_slots=1, max_waiting=0)
    admission.enqueue(Visitor())
    hints = set()
    for _ in range(20):
        with pytest.raises(CapacityError) as caught:
            admission.enqueue(Visitor())
        hints.add(caught.value.retry_after_s)
    assert len(hints) > 10
    assert 0.1 <= min(hints) <= max(hints) <= 10
