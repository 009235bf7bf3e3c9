"""Generator of the tables in docs/measurements, and of the figures in README.md: `python -m benchmarks.page`.

It fills the parts between `<!-- bench: NAME -->` and `<!-- /bench -->` from docs/performance.json (see
`benchmarks.suite`), docs/peers.json (`benchmarks.peers`) and docs/since.json (`benchmarks.since`). They are never
written by hand; tests/unit/test_performance.py compares the pages with the files.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import since
from benchmarks.peers import tables
from benchmarks.suite import FILE, SET
from specdec.comparison.report.markdown import PART, markdown
from specdec.inference.config import ROOT

MEASUREMENTS = ROOT / "docs" / "measurements"
PAGES = (
    *(MEASUREMENTS / name for name in ("passes.md", "architectures.md", "peers.md", "vllm.md")),
    ROOT / "README.md",
)
WIDTH = 120
BUSY = 0.5
"""Load average per core, before a run, above which the page says that the run's figures are in doubt."""

Bench = Mapping[str, Any]
TITLES = {
    tables.VLLM: "## vLLM",
    tables.VLLM_110M: "## vLLM, shape 110M",
    tables.SERVE: "## Stock `vllm serve` with our file and a pool, at equal scheduling",
    tables.SERVE_DEFAULTS: "## Stock `vllm serve` with our file and a pool, at vLLM's defaults",
}
"""Headings of the comparisons with vLLM, by shape (kind of models and servers)."""


def main() -> None:
    bench = measured()
    for page in PAGES:
        page.write_text(generated(page.read_text(encoding="utf-8"), bench), encoding="utf-8")


def measured() -> Bench:
    """Return all measurements in one mapping: entries of `make bench`, and, if measured, "peers" and "since"."""
    performance: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    others = {"peers": tables.FILE, "since": since.FILE}
    return performance | {
        name: json.loads(file.read_text(encoding="utf-8")) for name, file in others.items() if file.exists()
    }


def generated(text: str, bench: Bench) -> str:
    """Return a page's text in which each part that stands between two marks is replaced by its present figures.

    Raises:
        KeyError: a mark names no part that can be generated.
    """
    return PART.sub(lambda found: f"{found[1]}{part(found[2], bench)}\n{found[3]}", text)


def part(name: str, bench: Bench) -> str:
    """Return the generated text of the part `name` of a page, to stand between the part's marks."""
    if name in SET:
        return "\n\n".join((f"`{bench[name]['command']}`", *bench[name]["tables"]))
    if name in MEASURED_APART and name.partition("_")[0] not in bench:
        return "Not measured yet."
    return PARTS[name](bench)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _machine(bench: Bench) -> str:
    versions = ", ".join(_versions(bench["machine"]["versions"]))
    return _filled(f"{_hardware(bench)}; {versions}; commit {bench['commit']}. {_warning(bench)}")


def _hardware(bench: Bench) -> str:
    machine = bench["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"


def _versions(packages: Mapping[str, str]) -> list[str]:
    return [f"{name} {version}" for name, version in packages.items()]


def _warning(bench: Bench) -> str:
    quick = " Few repeats were made (`--quick`)." if bench.get("quick") else ""
    if bench["load_before"] <= BUSY * bench["machine"]["cores"]:
        return f"The machine was quiet (load average {bench['load_before']:g} before the run).{quick}"
    return (
        f"**The machine was busy with other work (load average {bench['load_before']:g} before the run): figures are "
        f"too slow, and ratios may be off.**{quick}"
    )


def _comparison(bench: Bench) -> str:
    results = bench["comparison"]
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for cell, statistics in zip(results["cells"], results["statistics"], strict=True):
        rows[cell["kind"], _series(cell)][f"{cell['rtt_ms']:g} ms"] = _over_target(cell, statistics)
    trips = list(dict.fromkeys(trip for row in rows.values() for trip in row))
    table = markdown(["prompts", "topology", *trips], [[*names, *row.values()] for names, row in rows.items()])
    conditions = ". ".join(results["conditions"][name] for name in ("Prompts", "Runs", "Load"))
    return f"`{results['command']}`\n\n{conditions}.\n\n{table}"


def _series(cell: Bench) -> str:
    return f"{cell['topology']} {cell['schedule']}" if cell["schedule"] else str(cell["topology"])


def _over_target(cell: Bench, statistics: Bench) -> str:
    """Return a table's entry: the target's tokens per second, or another topology's speed-up over it, with a range."""
    if cell["topology"] == "target":
        return f"{cell['tokens_per_s']:.0f} tokens/s"
    over = statistics["over_target"].get("end_to_end_latency_s")
    same = ", no difference" if over and "no difference" in str(over["verdict"]) else ""
    return f"{cell['speedup']:.2f} ({cell['speedup_min']:.2f}-{cell['speedup_max']:.2f}){same}"


def _headline(bench: Bench) -> str:
    """Return the README's table of speed-ups, as ranges over kinds of prompts, below a sentence on its conditions."""
    machine, results = bench["machine"], bench["comparison"]
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in results["cells"]:
        if cell["topology"] != "target":
            rows[f"{cell['rtt_ms']:g} ms"][_series(cell)].append(cell["speedup"])
    names = list(next(iter(rows.values())))
    table = [[rtt, *(_range(speedups[name]) for name in names)] for rtt, speedups in rows.items()]
    conditions = _filled(
        f"Measured with `{results['command']}` on {machine['cores']} cores of {machine['cpu']}, bundled pair, one "
        f"thread a model, commit {bench['commit']}: how many times as fast as the target alone, in tokens/s, medians "
        f"by kind of prompt. {_warning(bench)}"
    )
    return f"{conditions}\n\n{markdown(['round trip', *names], table)}"


def _range(speedups: Sequence[float]) -> str:
    least, most = f"{min(speedups):.1f}", f"{max(speedups):.1f}"
    return least if least == most else f"{least} to {most}"


def _peers(bench: Bench, *, of_vllm: bool) -> str:
    """Return the machines and versions of the runs of `benchmarks.peers`, and the tables of each shape of models.

    With `of_vllm` these are the shapes that are compared with vLLM, else the other shapes.
    """
    shapes = {name: runs for name, runs in bench["peers"].items() if (name in TITLES) == of_vllm}
    runs = list(itertools.chain(*shapes.values()))
    versions = (_versions({**run["machine"]["versions"], **run["versions"]}) for run in runs)
    conditions = ", ".join(dict.fromkeys((*map(_hardware, runs), *itertools.chain(*versions))))
    return "\n\n".join([_filled(f"{conditions}."), *(_shape(name, shape) for name, shape in shapes.items())])


def _shape(name: str, runs: Sequence[Bench]) -> str:
    rows = tables.rows_of(runs)
    failures = {(re.sub(r", \d+ streams", "", peer), why) for run in runs for peer, why in run["skipped"].items()}
    skipped = {f"Skipped: {peer}: {why}" for peer, why in failures}
    sentences = (tables.plain_sentence(rows), tables.changed_sentence(rows), tables.texts_sentence(rows))
    parts = [
        TITLES.get(name, f"## Shape {name}"),
        _filled(" ".join(sentences)),
        "\n".join(f"- {text}" for text in (*map(_run, runs), *sorted(skipped))),
        markdown(*tables.goals_of(name)(rows)),
        markdown(*tables.rates_table(rows)),
    ]
    return "\n\n".join(parts)


def _run(run: Bench) -> str:
    """Return a sentence with a run's command, number of prompts and commit, and how busy the machine was."""
    return f"`{run['command']}`, {run['plan']['num_prompts']} prompts, commit {run['commit']}. {_warning(run)}"


def _since(bench: Bench) -> str:
    """Return how this checkout was compared with an earlier commit, and a table of the latencies that differ."""
    found = bench["since"]
    changes = since.rows(found)
    conditions = _filled(
        f"`{found['command']}`, which runs `{found['comparison']}` at both: {_machine(found)} {len(found['changes'])} "
        f"latencies compared, {len(found['changes']) - len(changes)} show no difference."
    )
    notes = "".join(f"\n- {text}" for text in (*found["differing"], *found["omissions"]))
    return "\n\n".join([conditions, *([notes.strip()] if notes else []), markdown(since.HEADER, changes)])


PARTS: Mapping[str, Callable[[Bench], str]] = {
    "machine": _machine,
    "headline": _headline,
    "comparison": _comparison,
    "peers": partial(_peers, of_vllm=False),
    "peers_vllm": partial(_peers, of_vllm=True),
    "since": _since,
}
"""Functions that generate parts of pages, by the name in the part's mark; benchmarks in SET print theirs themselves."""
MEASURED_APART = ("peers", "peers_vllm", "since")
"""Parts whose figures `make bench` does not measure; the files with these figures may be missing."""

if __name__ == "__main__":
    main()
