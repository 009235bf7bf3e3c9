"""Claim on speed: by default, no topology is slower than the target alone, under any condition measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.claims import plan
from scripts.claims.verdict import Verdict
from specdec.inference.config import ROOT
from specdec.inference.errors import UnavailableError
from specdec.inference.observe.host_load import HostLoad, busy_warning


def never_slower(size: plan.Size, directory: Path) -> Verdict:
    """Compare the speeds of all topologies with the target alone, with `--drafting measured`; return the verdict."""
    command = ["compare_architectures.py", "--drafting", "measured", "--rtt_ms", "0", *size.speed]
    done = subprocess.run(
        [sys.executable, *command, "--output", str(directory)], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise UnavailableError(f"python {' '.join(command)} ended with exit code {done.returncode}")
    results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    cells = [cell for cell in results["cells"] if cell["topology"] != "target" and cell["speedup"] is not None]
    rows = [["prompts", "topology", "schedule", "in flight", "times the target alone"]]
    for cell in cells:
        place = (cell["kind"], cell["topology"], cell["schedule"] or "-", str(cell["concurrency"]))
        rows.append([*place, f"{cell['speedup']:.2f}"])
    return judged(rows, min(cell["speedup"] for cell in cells), results["load"])


def judged(rows: list[list[str]], least: float, load: dict[str, Any]) -> Verdict:
    """Return the verdict for the least speed-up, with table rows; on a busy machine it is "not judged".

    `load` is the entry "load" of results.json: fields of `HostLoad`, and "spread", the speed of the fastest of equal
    runs over that of the slowest.
    """
    spread = load["spread"]
    busy = busy_warning(HostLoad(**{name: value for name, value in load.items() if name != "spread"}), spread)
    return Verdict(
        f"No cell is slower than the target alone (at least {plan.LEAST_SPEED:g} times as fast)",
        "the machine was busy" if busy else f"the slowest of {len(rows) - 1} cells is {least:.2f} times as fast",
        None if busy else least >= plan.LEAST_SPEED,
        () if busy else rows,
    )
