"""The picture at the top of README shows the figures of its race, and is a small file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from scripts.race_picture import PROMPT, Run, draw
from specdec.inference.commit import Delta
from specdec.inference.config import ROOT

SVG = "{http://www.w3.org/2000/svg}"
PIECES = ["a & b ", "<c> ", "long_word_that_fills_more_than_half_a_row ", "d\n", "\ne", " f"]


def words(picture: ET.Element, left: bool) -> str:
    """Return the text of the left or right half of the picture, without line breaks."""
    texts = [each for each in picture.iter(f"{SVG}text") if each.get("class") in ("prompt", "own", "drafted")]
    column = [each.text or "" for each in texts if (float(each.get("x", "0")) < 390) == left]
    return re.sub(r"\s+", "", "".join(column))


def run_of(pieces: list[str], accepted: int) -> Run:
    passes = []
    for number, piece in enumerate(pieces):
        delta = Delta(number, (7,), text=piece, piece_lengths=(len(piece),), num_accepted_tokens=accepted)
        passes.append((0.1 * (number + 1), delta))
    return Run(passes)


def test_a_picture_has_the_whole_text_in_both_columns() -> None:
    picture = ET.fromstring(draw(run_of(PIECES, 0), run_of(PIECES, 1)))
    whole = re.sub(r"\s+", "", PROMPT + "".join(PIECES))
    assert words(picture, left=True) == words(picture, left=False) == whole


def test_the_picture_of_readme_is_small_and_loads_nothing() -> None:
    file = ROOT / "docs" / "race.svg"
    assert file.stat().st_size <= 500_000
    text = file.read_text(encoding="utf-8")
    picture = ET.fromstring(text)
    assert words(picture, left=True) == words(picture, left=False) != ""
    assert not re.search(r"<script|href|url\(|@import|<image", text)
    (title,) = [each.text or "" for each in picture.iter(f"{SVG}title")]
    speed_up = re.search(r"[\d.]+ times as fast", title)
    assert speed_up is not None
    assert speed_up[0] in (ROOT / "README.md").read_text(encoding="utf-8"), "README has the figure of another picture"
