"""Latencies of an earlier commit and of this checkout: `python -m benchmarks.since [COMMIT] [--file FILE]`.

The earlier commit is checked out under build/since. Both run the same comparison in turns, twice, in three to six
minutes, and `specdec diff` describes the method. FILE (docs/since.json) gets the changes, and
`python -m benchmarks.page` puts them on docs/measurements/architectures.md.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine, print_json, print_table, write
from specdec.comparison.report.diff import Change, Results, compare, differing_conditions, omissions, read_results
from specdec.comparison.report.markdown import commit
from specdec.inference.config import ROOT
from specdec.inference.observe.host_load import load_average

FILE = ROOT / "docs" / "since.json"
FIRST = "41a4973"
"""Earlier commit that docs/measurements/architectures.md compares with, unless COMMIT names another one."""
FLAGS = "--num_prompts 2 --num_runs 4 --rtt_ms 0,10 --max_new_tokens 64"
HEADER = ["measurement", "figure", "new / old, 95 %", "verdict"]


def main() -> None:
    args = _parser().parse_args()
    load = load_average()
    old = _checkout(args.commit)
    found: dict[Path, list[Results]] = {old: [], ROOT: []}
    for checkout in (old, ROOT, ROOT, old):  # so that a machine that grows slower or faster does so for both
        found[checkout].append(_compared(checkout))
    before, after = (joined(results, checkout) for checkout, results in found.items())
    content = {
        "command": f"python -m benchmarks.since {args.commit}",
        "comparison": f"specdec compare {FLAGS}",
        "old": args.commit,
        "commit": commit(),
        "load_before": load,
        "machine": machine(),
        "differing": differing_conditions(before, after),
        "omissions": omissions(before, after),
        "changes": [change_row(change) for change in compare(before, after)],
    }
    write(content, args.file)
    print_table(f"since {args.commit}", HEADER, content["changes"])
    print_json("since", content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.since", description=__doc__)
    parser.add_argument("commit", nargs="?", default=FIRST, help="the earlier one (%(default)s)")
    parser.add_argument("--file", type=Path, default=FILE, help="what is written (%(default)s)")
    return parser


def change_row(change: Change) -> list[str]:
    """Return a change as a table row; the verdict is "no difference" if the ratio's interval contains 1."""
    return [change.where, change.figure, str(change.ratio), change.verdict if change.ratio.differs else "no difference"]


def _checkout(earlier: str) -> Path:
    """Return a folder with the files of an earlier commit; check it out if no earlier call did."""
    folder = ROOT / "build" / "since" / earlier
    if not folder.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), earlier], cwd=ROOT, check=True)
    return folder


def _compared(checkout: Path) -> Results:
    """Run the comparison of a checkout, in this Python's environment; return its results.

    Raises:
        SystemExit: the comparison failed; answers that differ are no failure here.
    """
    output = checkout / "reports" / "since"
    command = [sys.executable, "compare_architectures.py", *shlex.split(FLAGS), "--output", str(output)]
    print(f"{checkout}: specdec compare {FLAGS}", flush=True)
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        sys.exit(f"the comparison in {checkout} ended with exit code {done.returncode}")
    return read_results(output)


def joined(results: Sequence[Results], checkout: Path) -> Results:
    """Return the results of a checkout's runs as those of one run, with all of their requests.

    The checkout's path is removed from the conditions.
    """
    conditions = {name: str(text).replace(f"{checkout}/", "") for name, text in results[0]["conditions"].items()}
    cells = zip(*(each["requests"] for each in results), strict=True)
    return {**results[0], "conditions": conditions, "requests": [[*itertools.chain(*cell)] for cell in cells]}


def rows(content: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the page's table, one for each latency that differs between the two commits."""
    return [row for row in content["changes"] if row[-1] != "no difference"]


if __name__ == "__main__":
    main()
