"""Animated picture of one race: `python -m scripts.race_picture docs/race.svg`.

Starts both bundled models in one server, and completes one prompt without and with draft tokens in turn, with one seed.
The picture replays the pair of runs with the median ratio of times. It is SVG, with neither script nor font. Where
nothing can move, it shows the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from specdec.comparison.plan.machine import cpu_model
from specdec.grpc_comm.channel import open_channel
from specdec.inference.commit import Delta
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import free_port, server_process
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest

PROMPT = '{"id": 1, "name": "Ann"}, {"id": 2,'
SAMPLING, SEED, NUM_TOKENS = SamplingParams(temperature=0.8), 3, 96
NUM_PAIRS = 5
SLOWER = 10.0
"""Seconds of the picture per second of the run: at its own speed one could not follow it."""
PAUSE_S = 4.0
COLUMNS, CHARACTER, LINE, TOP = 44, 7.83, 19, 96
WIDTH, COLUMN_X = 760, (20, 400)
BARS = {"without draft tokens": "#8a94a3", "with draft tokens": "#e69f00"}
STYLE = """text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1c2129; white-space: pre; }
.title { font: 600 15px system-ui, sans-serif; } .big { font: 700 19px system-ui, sans-serif; }
.small { font: 12px system-ui, sans-serif; fill: #5c6673; } .prompt { fill: #8a94a3; } .rejected { fill: #b3261e;
text-decoration: line-through; } .drafted { fill: #0d4f27; } .mark { fill: #d3efdc; }"""


@dataclass(slots=True)
class Run:
    """One completion: its passes, each with the seconds since the request was sent."""

    passes: list[tuple[float, Delta]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.passes[-1][0]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for _, delta in self.passes for token_id in delta.token_ids]


async def complete(completer: RemoteCompleter, gamma: int | None, salt: str) -> Run:
    """Complete the prompt; under a new `salt` no slot holds its beginning."""
    request = CompletionRequest(
        PROMPT, SAMPLING, SEED, NUM_TOKENS, gamma=gamma, cache_salt=salt, include_rejected=True, ignore_eos=True
    )
    run, sent = Run(), time.perf_counter()
    async with aclosing(completer.complete(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                run.passes.append((time.perf_counter() - sent, event))
    return run


async def race() -> tuple[Run, Run]:
    """Return the pair of runs, without and with draft tokens, that has the median ratio of times."""
    port = free_port()
    flags = ("--port", str(port), "--threads", "1")
    async with (
        server_process("fused", "fused_target", *flags, port=port) as server,
        open_channel(server.address) as link,
    ):
        completer = RemoteCompleter(link, server.address, deadline_s=60)
        pairs = [
            (await complete(completer, 0, f"{number} without"), await complete(completer, None, f"{number} with"))
            for number in range(NUM_PAIRS + 1)
        ][1:]  # the first one is a warm-up
    pairs.sort(key=lambda pair: pair[0].seconds / pair[1].seconds)
    return pairs[len(pairs) // 2]


class Layout:
    """Places of the characters of a text in a column, which wraps at spaces."""

    def __init__(self, text: str, left: float) -> None:
        self.num_placed = 0
        self._text = text
        self._left = left
        self._places: list[tuple[int, int]] = []  # row, column
        row = column = 0
        for line in text.split("\n"):
            for word in re.findall(r"[^ ]* *", line)[:-1] or [""]:
                if column + len(word.rstrip()) > COLUMNS:
                    row, column = row + 1, 0
                self._places += [(row, column + i) for i in range(len(word))]
                column += len(word)
            self._places.append((row, column))
            row, column = row + 1, 0
        self.num_rows = row

    def place(self, text: str) -> Iterator[tuple[float, float, str]]:
        """Place the next piece of the text; yield (x, y, part) for each row that the piece touches."""
        start, self.num_placed = self.num_placed, self.num_placed + len(text)
        for row, group in itertools.groupby(range(start, self.num_placed), key=lambda i: self._places[i][0]):
            indices = [i for i in group if self._places[i][1] < COLUMNS]  # a space may follow the last column
            if indices and (part := self._text[indices[0] : indices[-1] + 1].rstrip("\n")):
                yield (*self._point(row, self._places[indices[0]][1]), part)

    def behind(self, text: str) -> tuple[float, float, str]:
        """Return (x, y, text) of a rejected draft text, placed after the last piece and cut to the room in that row."""
        row, column = self._places[self.num_placed - 1]
        return (*self._point(row, column + 1), text.replace("\n", " ")[: max(0, COLUMNS + 2 - column)])

    def _point(self, row: int, column: int) -> tuple[float, float]:
        return self._left + column * CHARACTER, TOP + row * LINE


def shown(start_s: float, end_s: float | None = None) -> str:
    """Return the animation of an element that appears at `start_s` of the loop; with `end_s` it disappears then."""
    if end_s is None:
        return _set("hidden", "loop.begin", start_s)
    return _set("visible", f"loop.begin+{start_s:.2f}s", end_s)


def _set(visibility: str, begin: str, end_s: float) -> str:
    times = f'begin="{begin}" end="loop.begin+{end_s:.2f}s"'
    return f'<set attributeName="visibility" to="{visibility}" {times}/>'


def text(x: float, y: float, content: str, kind: str, animation: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" {more}>{escape(content)}{animation}</text>'


def mark(x: float, y: float, content: str, animation: str) -> str:
    place = f'x="{x:.1f}" y="{y - 13:.1f}" width="{len(content) * CHARACTER:.1f}" height="17"'
    return f'<rect class="mark" {place}>{animation}</rect>'


def column(run: Run, left: float, title: str) -> tuple[list[str], int]:
    """Return the SVG elements of one run, and the number of rows of its text."""
    rate = f"{len(run.token_ids) / run.seconds:.0f} tokens/s"
    end_s = run.seconds * SLOWER
    bar, colour = f'<rect x="{left}" y="52" width="340" height="7" rx="3.5"', BARS[title]
    grows = f'<animate attributeName="width" from="0" to="340" dur="{end_s:.2f}s" begin="loop.begin"/>'
    elements = [
        text(left, 40, title, "title"),
        text(left + 340, 40, rate, "big", shown(end_s), 'text-anchor="end"'),
        f'{bar} fill="#d9dde3"/>',
        f'{bar} fill="{colour}">{grows}</rect>',
    ]
    layout = Layout(PROMPT + "".join(delta.text for _, delta in run.passes), left)
    elements += [text(*place, "prompt") for place in layout.place(PROMPT)]
    ends_s = [at_s for at_s, _ in run.passes[1:]] + [run.seconds + 1.0]
    for (at_s, delta), next_s in zip(run.passes, ends_s, strict=True):
        appears = shown(at_s * SLOWER)
        for index, piece in enumerate(delta.pieces()):
            is_drafted = index < delta.num_accepted_tokens
            for x, y, part in layout.place(piece):
                elements += [mark(x, y, part, appears)] if is_drafted else []
                elements.append(text(x, y, part, "drafted" if is_drafted else "own", appears))
        if delta.rejected_text:
            flashes = shown(at_s * SLOWER, next_s * SLOWER)
            elements.append(text(*layout.behind(delta.rejected_text), "rejected", flashes, 'visibility="hidden"'))
    return elements, layout.num_rows


def draw(without: Run, drafted: Run) -> str:
    """Return the picture of both runs as SVG."""
    (left, num_left), (right, num_right) = map(column, (without, drafted), COLUMN_X, BARS)
    bottom = TOP + max(num_left, num_right) * LINE + 18
    end_s, num_tokens = without.seconds * SLOWER, len(without.token_ids)
    same = sum(a == b for a, b in zip(without.token_ids, drafted.token_ids, strict=True))
    verdict = f"{without.seconds / drafted.seconds:.1f} times as fast, identical: {same} of {num_tokens} tokens"
    where = f"bundled pair in one server, one thread a model, {cpu_model()}"
    how = f"Green: drafted and accepted. Red: drafted and rejected. One run after the other, {SLOWER:g} times slower."
    conditions = f"Temperature {SAMPLING.temperature:g}, seed {SEED}; {where}."
    frame = f'<rect width="{WIDTH}" height="{bottom + 48}" rx="10" fill="#fff" stroke="#d9dde3">'
    loop = f'<animate id="loop" attributeName="rx" to="10" dur="{end_s + PAUSE_S:.2f}s" begin="0s;loop.end"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 48}" role="img">',
        f"<title>The same text, only sooner: {verdict}</title>",
        f"<style>{STYLE}</style>",
        f"{frame}{loop}</rect>",
        *left,
        *right,
        text(20, bottom, verdict, "big", shown(end_s)),
        text(20, bottom + 19, how, "small"),
        text(20, bottom + 36, conditions, "small"),
    ]
    return "\n".join([*lines, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the SVG to write")
    arguments = parser.parse_args()
    without, drafted = asyncio.run(race())
    if without.token_ids != drafted.token_ids:
        print("error: the two runs have different tokens", file=sys.stderr)
        return 1
    arguments.file.write_text(draw(without, drafted), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
