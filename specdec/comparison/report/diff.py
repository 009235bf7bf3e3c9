"""Latencies that differ significantly between two results (`compare_architectures.py diff OLD NEW`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.comparison.report.bootstrap import CONFIDENCE, MIN_PAIRS, Ratio, stratified_ratio
from specdec.comparison.report.findings import HOST_LOAD, PLACE
from specdec.comparison.report.service import LATENCIES
from specdec.inference.cli.config_file import program
from specdec.inference.errors import ConfigError

EXIT_SLOWER = 1
THRESHOLD = 0.05
MAY_DIFFER = ("Runs", HOST_LOAD)
"""Conditions that may differ; all others must be equal for results to be comparable."""

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one latency under the same conditions, from an old result to a new one.

    Attributes:
        where: way to serve and conditions, as text.
        figure: name of the latency.
        ratio: latency of the new result over that of the old, with its interval of confidence.
    """

    where: str
    figure: str
    ratio: Ratio

    def is_slower(self, threshold: float) -> bool:
        """Return whether even the lower end of the ratio's interval is above 1 by more than `threshold` (0.05: 5 %)."""
        return self.ratio.low > 1.0 + threshold

    @property
    def verdict(self) -> str:
        return "slower" if self.ratio.low > 1.0 else "faster"


def diff(arguments: Sequence[str]) -> int:
    """Compare the results of two comparisons, and print the latencies that differ significantly.

    Returns:
        0, or 1 if a latency is slower by more than the threshold.

    Raises:
        ConfigError: a file cannot be used, or conditions differ without --anyway.
    """
    args = _parser().parse_args(arguments)
    old, new = read_results(args.old), read_results(args.new)
    changes = compare(old, new)
    differing = differing_conditions(old, new)
    if differing and not args.anyway:
        raise ConfigError("conditions differ (--anyway compares all the same): " + "; ".join(differing))
    for name, results in (("old", old), ("new", new)):
        for text in results.get("warnings", ()):
            print(f"warning: {name}: {text}", file=sys.stderr)
    for text in differing:
        print(f"warning: not the same conditions: {text}", file=sys.stderr)
    _print(changes, args.threshold)
    for text in omissions(old, new):
        print(text)
    return EXIT_SLOWER if any(change.is_slower(args.threshold) for change in changes) else 0


def _parser() -> argparse.ArgumentParser:
    prog = program("diff", "compare_architectures.py diff")
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    text = "results.json of a comparison, its directory, or the file that make bench wrote"
    for name in ("old", "new"):
        parser.add_argument(name, type=Path, help=text)
    text = "share by which a latency must be slower for exit code 1 (%(default)s)"
    parser.add_argument("--threshold", type=float, default=THRESHOLD, metavar="SHARE", help=text)
    parser.add_argument("--anyway", action="store_true", help="also compare results of different machines or settings")
    return parser


def read_results(path: Path) -> Results:
    """Return the results that a comparison wrote into a file, or into results.json in a directory.

    Raises:
        ConfigError: the file cannot be read, or has no requests.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        results: Results = content.get("comparison", content)
        cells = _by_cell(results).values()
        _ = dict(results["conditions"]), [_by_prompt(cell, name) for cell in cells for name in LATENCIES]
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read: {exc.strerror}") from exc
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{file} is not a result of a comparison with its requests: {exc!r}") from exc
    return results


def differing_conditions(old: Results, new: Results) -> list[str]:
    """Return a text for each condition that differs, with its name and both values, such as machine, models or load."""
    before, after = old["conditions"], new["conditions"]
    names = [name for name in {**before, **after} if name not in MAY_DIFFER]
    return [f"{name}: {before.get(name)} | {after.get(name)}" for name in names if before.get(name) != after.get(name)]


def omissions(old: Results, new: Results) -> list[str]:
    """Return sentences about failed requests, and about measurements that only one result has."""
    before, after = _by_cell(old), _by_cell(new)
    failed = [sum(it["error_code"] is not None for it in chain(*cells.values())) for cells in (before, after)]
    omitted = [f"failed requests, in no latency: {failed[0]} in old, {failed[1]} in new"] if any(failed) else []
    lone = sorted(before.keys() ^ after.keys())
    return omitted + [f"only in {'old' if it in before else 'new'}: {it}" for it in lone]


def compare(old: Results, new: Results) -> list[Change]:
    """Return the change of every latency of every measurement that both results have.

    More latencies make wider intervals (Bonferroni), so that only one in twenty pairs of equal results shows a change.

    Raises:
        ConfigError: there is no common latency.
    """
    before, after = _by_cell(old), _by_cell(new)
    shared = [(where, figure) for where in before.keys() & after.keys() for figure in LATENCIES]
    sides = {key: (_by_prompt(before[key[0]], key[1]), _by_prompt(after[key[0]], key[1])) for key in sorted(shared)}
    known = {key: side for key, side in sides.items() if side[0].keys() & side[1].keys()}
    if not known:
        raise ConfigError("the two results have no measurement in common")
    confidence = 1 - (1 - CONFIDENCE) / len(known)
    return [Change(*key, stratified_ratio(*side, confidence=confidence)) for key, side in known.items()]


def _by_cell(results: Results) -> dict[str, list[dict[str, Any]]]:
    places = [{name: cell.get(name) for name in PLACE} for cell in results["statistics"]]
    names = [", ".join(f"{name} {value}" for name, value in place.items() if value is not None) for place in places]
    return dict(zip(names, results["requests"], strict=True))


def _by_prompt(requests: Sequence[Mapping[str, Any]], figure: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        if request["error_code"] is None and request[figure]:
            found[str(request["prompt"])].append(request[figure])
    return found


def _print(changes: Sequence[Change], threshold: float) -> None:
    """Print the differing latencies, slowest first, and the number of others."""
    differing = sorted((it for it in changes if it.ratio.differs), key=lambda it: it.ratio.estimate, reverse=True)
    if differing:
        table = Table("measurement", "figure", "new / old", "verdict")
        for change in differing:
            mark = f", by more than {threshold:.0%}" if change.is_slower(threshold) else ""
            table.add_row(change.where, change.figure, str(change.ratio), change.verdict + mark)
        Console(width=160).print(table)
    num_undecided = sum(change.ratio.num_pairs < MIN_PAIRS for change in changes)
    few = f", {num_undecided} have too few runs to tell" if num_undecided else ""
    print(f"{len(changes)} latencies compared: {len(changes) - len(differing) - num_undecided} show no difference{few}")
    num_slower, num_beyond = (sum(it.is_slower(least) for it in changes) for least in (0.0, threshold))
    beyond = f"{num_beyond} of them by more than {threshold:.0%}"
    print(f"{num_slower} slower, {beyond}; {len(differing) - num_slower} faster")
