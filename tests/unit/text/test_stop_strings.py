"""A text ends before its first stop string, however it is cut into pieces; text that begins none is not delayed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.errors import InvalidRequestError
from specdec.inference.text.stop_strings import StopStrings, check_stops

texts = st.text(alphabet="ab\u00e9", max_size=30)
stops = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=300)
@given(st.lists(texts.map(lambda text: text[:3]), max_size=20), stops)
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """The text ends before the first occurrence of any stop string, however the stream is cut into pieces."""
    watch, given_text, whole = StopStrings(stops), "", ""
    for piece in pieces:
        whole += piece
        given_text += watch.push(piece)
        places = [whole.find(stop) for stop in stops if stop in whole]
        assert watch.found == bool(places)
        if places:
            assert given_text == whole[: min(places)]
            return
        held = whole[len(given_text) :]
        assert whole.startswith(given_text)
        assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
    assert given_text + watch.rest() == whole


@pytest.mark.parametrize(("stops", "limit"), [([""], "1..256"), (["x" * 257], "1..256"), (["x"] * 17, "16")])
def test_stop_strings_beyond_the_limits_are_refused(stops: list[str], limit: str) -> None:
    with pytest.raises(InvalidRequestError, match="stop") as caught:
        check_stops(stops)
    assert limit in str(caught.value)


def test_many_long_stop_strings_that_nearly_match_cost_little() -> None:
    """Many long stop strings take little time, even if the text nearly matches them.

    Regression: each token was compared with every beginning of every stop string, in Python.
    """
    watch = StopStrings(["a" * 255 + chr(ord("b") + i) for i in range(16)])
    assert "".join(watch.push("a") for _ in range(20_000)) + watch.rest() == "a" * 20_000
