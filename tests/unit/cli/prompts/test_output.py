"""Text on a terminal: accepted draft tokens are coloured, and the text is unchanged."""

from __future__ import annotations

import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.cli.prompts.output import GREEN, PLAIN, TokenSink, coloured
from specdec.inference.commit import Delta
from specdec.inference.request import SamplingParams
from specdec.inference.workers.completing.results import Result

PASS = Delta(1, (5, 6, 7), 3, 2, text="abc", piece_lengths=(1, 1, 1))


def test_accepted_draft_tokens_are_green_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    mine, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(mine):
        monkeypatch.setattr("sys.stdout", terminal)
        shown = coloured(PASS)
        monkeypatch.setenv("NO_COLOR", "1")
        plain = coloured(PASS)
        monkeypatch.undo()
    assert (shown, plain) == (f"{GREEN}a{PLAIN}{GREEN}b{PLAIN}c", "abc")


def test_a_file_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert coloured(PASS) == "abc"


@given(st.lists(st.text(max_size=3), max_size=6), st.integers(0, 8), st.text(max_size=3))
def test_marked_draft_tokens_keep_the_text(pieces: list[str], num_accepted: int, rest: str) -> None:
    lengths = tuple(map(len, pieces))
    delta = Delta(1, tuple(range(len(pieces))), 8, num_accepted, text="".join([*pieces, rest]), piece_lengths=lengths)
    assert "".join(text for text, _ in delta.marked()) == delta.text
    assert sum(drafted for _, drafted in delta.marked()) == min(num_accepted, len(pieces))


@pytest.mark.parametrize("lengths", [(1, 1, 1), ()])
def test_each_token_has_a_line_with_its_origin(lengths: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Format `tokens` prints each token's index and id, and, if texts' lengths are known, text and draft or target."""
    delta, result = Delta(1, (5, 6, 7), 3, 2, text="abc", piece_lengths=lengths), Result("x")
    result.record(delta)
    TokenSink(SamplingParams()).show(result, delta)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["0", "5"], ["1", "6"], ["2", "7"]]
    if lengths:
        assert [row[2:] for row in rows] == [["draft", "'a'"], ["draft", "'b'"], ["target", "'c'"]]
