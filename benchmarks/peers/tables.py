"""Tables of docs/measurements/peers.md and vllm.md, which compare programs, made from docs/peers.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.peers.engine import OURS
from benchmarks.peers.race import PLAIN
from specdec.inference.config import ROOT

FILE = ROOT / "docs" / "peers.json"
GOALS = {"float32": 1.2, "int8": 1.5}
"""Goals, by dtype: least ratio of this project's best tokens per second with drafts to another program's best."""
NUMBERS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "8 bits"}
VLLM, VLLM_110M = "vllm", "vllm-110M"
"""Names of shapes (kinds of models) that compare this project's target over vLLM with vLLM: tiny, and usual models."""
DEFAULTS = "defaults"
SERVE, SERVE_DEFAULTS = "serve", f"serve-{DEFAULTS}"
"""Names of shapes that compare vLLM's server with this project's configuration and draft pool to vLLM's alone."""

Row = Mapping[str, Any]
Run = Mapping[str, Any]
"""Result of one call of `benchmarks.peers`: its command, conditions, versions, skipped variants and rows."""
Table = tuple[list[str], list[list[str]]]


def joined(earlier: Sequence[Run], run: Run) -> list[Run]:
    """Return the runs of a shape after the new `run`: the earlier ones, without rows measured again, and the new one.

    All rows of one dtype and number of streams come from one run, so that no ratio compares two runs.
    """
    again = {_place(row) for row in run["rows"]}
    kept = [{**each, "rows": [row for row in each["rows"] if _place(row) not in again]} for each in earlier]
    return [*(each for each in kept if each["rows"]), run]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of all runs of a shape, sorted by dtype and number of streams."""
    return sorted((row for run in runs for row in run["rows"]), key=_place)


def _place(row: Row) -> tuple[str, int]:
    return row["dtype"], row["num_streams"]


def median(row: Row) -> float:
    """Return the median of a row's tokens per second."""
    return float(statistics.median(row["tokens_per_s"]))


def ratio(row: Row, other: Row) -> float:
    """Return how many times as fast `row` is as `other`: the median of the ratios for each prompt, or each round."""
    pairs = zip(row["tokens_per_s"], other["tokens_per_s"], strict=True)
    return float(statistics.median(one / another for one, another in pairs))


def goals(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield pairs of rows: this project's fastest with drafts, and another program's fastest.

    There is a pair for each program, dtype and number of streams.
    """
    for place in dict.fromkeys(map(_place, rows)):
        alike = [row for row in rows if _place(row) == place]
        ours = [row for row in alike if row["engine"] == OURS and row["variant"] != PLAIN]
        for peer in dict.fromkeys(row["engine"] for row in alike if row["engine"] != OURS):
            if ours:
                yield max(ours, key=median), max((row for row in alike if row["engine"] == peer), key=median)


def goals_table(rows: Sequence[Row]) -> Table:
    """Return header and lines of a table of ratios, by dtype and number of streams.

    A ratio is the speed of this project's fastest variant with drafts over that of another program's fastest variant.
    An asterisk marks a missed goal.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    for ours, best in goals(rows):
        over = ratio(ours, best)
        mark = "" if over >= GOALS[ours["dtype"]] else "\\*"
        line = found.setdefault(_place(ours), {OURS: ours["variant"]})
        line[best["engine"]] = f"{over:.2f}{mark} ({best['variant']})"
    engines = list(dict.fromkeys(engine for line in found.values() for engine in line))
    body = [
        [f"{NUMBERS[dtype]}: {count}", *(line.get(engine, "-") for engine in engines)]
        for (dtype, count), line in found.items()
    ]
    return ["ours over", "our best", *engines[1:]], body


def goals_of(shape: str) -> Callable[[Sequence[Row]], Table]:
    """Return the function that makes the table of ratios of a shape (kind of models)."""
    over, beside = partial(vllm_table, base_of=base_over), partial(vllm_table, base_of=base_beside)
    found = {**dict.fromkeys((VLLM, VLLM_110M), over), **dict.fromkeys((SERVE, SERVE_DEFAULTS), beside)}
    return found.get(shape, goals_table)


def base_over(variant: str) -> tuple[str, float]:
    """Return with which variant of vLLM a variant of this project's target over vLLM is compared, and the goal.

    The goal is the least ratio of their tokens per second.
    """
    return {PLAIN: (PLAIN, 0.95), "lookup": ("ngram", 1.0)}.get(variant, ("draft_model", 1.0))


def base_beside(variant: str) -> tuple[str, float]:
    """Return with which variant of vLLM without a draft pool a variant with one is compared, and the goal.

    The goal is the least ratio of their tokens per second; 0 if there is none.
    """
    return DEFAULTS if variant.startswith(DEFAULTS) else PLAIN, 0.95 if variant == PLAIN else 0.0


def vllm_table(rows: Sequence[Row], base_of: Callable[[str], tuple[str, float]]) -> Table:
    """Return header and lines of a table: each variant of this project over the vLLM variant that `base_of` names."""
    places = list(dict.fromkeys(map(_place, rows)))
    body = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["engine"] == OURS):
        base, goal = base_of(variant)
        cells = (_over([row for row in rows if _place(row) == place], variant, base, goal) for place in places)
        body.append([f"{variant} over {base}" + (f" (goal {goal:g})" if goal else ""), *cells])
    return ["ours over vLLM", *(f"{NUMBERS[dtype]}: {count}" for dtype, count in places)], body


def _over(rows: Sequence[Row], variant: str, base: str, goal: float) -> str:
    """Return, as text, how many times as fast our variant is as the fastest of vLLM's whose names begin with `base`.

    An asterisk marks a missed goal; "-" stands for a ratio that was not measured.
    """
    ours = [row for row in rows if row["engine"] == OURS and row["variant"] == variant]
    theirs = [row for row in rows if row["engine"] != OURS and row["variant"].startswith(base)]
    if not ours or not theirs:
        return "-"
    best = max(theirs, key=median)
    over = ratio(ours[0], best)
    mark = "" if over >= goal else "\\*"
    return f"{over:.2f}{mark} ({best['variant']})"


def rates_table(rows: Sequence[Row]) -> Table:
    """Return header and lines of a table: tokens per second of each variant, by dtype and number of streams."""
    places = list(dict.fromkeys(map(_place, rows)))
    found = {(row["engine"], row["variant"], *_place(row)): row for row in rows}
    variants = dict.fromkeys((row["engine"], row["variant"]) for row in rows)
    columns = [[found.get((*variant, *place)) for place in places] for variant in variants]
    header = ["tokens/s", *(f"{NUMBERS[dtype]}: {count}" for dtype, count in places)]
    cells = [[f"{median(row):.0f}" if row else "-" for row in column] for column in columns]
    return header, [[", ".join(variant), *line] for variant, line in zip(variants, cells, strict=True)]


def thirds_table(rows: Sequence[Row]) -> Table:
    """Return header and lines of a table of speeds over the same program without a draft, in each third of the rounds.

    Only rows with several streams count. Other processes compete for the cores in the middle third.
    """
    plain = {(row["engine"], *_place(row)): row for row in rows if row["variant"] == PLAIN and row["num_streams"] > 1}
    lines = []
    for row in rows:
        if row["variant"] != PLAIN and (base := plain.get((row["engine"], *_place(row)))) is not None:
            size = len(row["tokens_per_s"]) / 3
            parts = [slice(round(third * size), round((third + 1) * size)) for third in range(3)]
            thirds = [[{"tokens_per_s": each["tokens_per_s"][part]} for each in (row, base)] for part in parts]
            names = [row["engine"], row["variant"], str(row["num_streams"])]
            lines.append([*names, *(f"{ratio(*third):.2f}" for third in thirds)])
    return ["engine", "variant", "streams", "before", "beside", "after"], lines


def texts_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on how many answers of each program, in each dtype, equal this project's."""
    known = [row for row in rows if row["engine"] != OURS and row["same_as_ours"] is not None]
    parts = []
    for engine, dtype in dict.fromkeys((row["engine"], row["dtype"]) for row in known):
        alike = [row for row in known if (row["engine"], row["dtype"]) == (engine, dtype)]
        equal, total = (sum(row[key] for row in alike) for key in ("same_as_ours", "num_answers"))
        parts += [f"{NUMBERS[dtype]} {engine} {equal} of {total}"] if equal < total else []
    return f"Answers with our text: {', '.join(parts) + '; otherwise all' if parts else 'all'}."


def plain_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on decoding of one stream without a draft: each program's tokens/s over this project's."""
    plain = {(row["dtype"], row["engine"]): row for row in rows if row["variant"] == PLAIN and row["num_streams"] == 1}
    parts = [
        f"{NUMBERS[dtype]} {engine} {ratio(row, plain[dtype, OURS]):.2f}"
        for (dtype, engine), row in plain.items()
        if engine != OURS and (dtype, OURS) in plain
    ]
    return f"Plain decoding of one stream, over ours: {', '.join(parts)}." if parts else ""


def changed_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on the programs whose answers drafts changed.

    A program's number is that of the variant with the most changed answers.
    """
    changed: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["same_as_plain"] is not None:
            variants = changed.setdefault(f"{NUMBERS[row['dtype']]} {row['engine']}", {})
            variants[row["variant"]] = variants.get(row["variant"], 0) + row["num_answers"] - row["same_as_plain"]
    parts = [f"{name} {max(variants.values())}" for name, variants in changed.items() if any(variants.values())]
    found = f"{', '.join(parts)} (of its worst variant)" if parts else "none"
    return f"Answers that speculation changed: {found}."
