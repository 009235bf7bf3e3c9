"""Answers over gRPC, which are read after they have ended."""

from __future__ import annotations

from comparison.run.grpc_client import _is_whole
from inference.commit import Delta, Event, Finished, FinishReason, Started, Timings


def test_an_answer_with_a_gap_is_not_whole() -> None:
    """Proxies have dropped whole messages. Such an answer would be short, and so fast."""
    tokens = [Delta(at, (7, 8), 0, 0, Timings()) for at in (4, 6, 8)]
    whole: list[Event] = [Started(4, 0), *tokens, Finished(FinishReason.LENGTH)]
    assert _is_whole(whole)
    assert [_is_whole(whole[:lost] + whole[lost + 1 :]) for lost in range(3)] == [False] * 3
    assert not _is_whole(whole[:-1])
    assert not _is_whole([])
