"""Files of a report: results.csv, results.json, the pictures and report.html."""

from __future__ import annotations

import csv
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from specdec.comparison.report.findings import Findings, json_of
from specdec.comparison.report.llmperf import write_llmperf
from specdec.inference.errors import ConfigError, SpecDecError

logger = logging.getLogger(__name__)
Figures: TypeAlias = dict[str, Any]


def prepare_directory(directory: Path) -> None:
    """Create the directory of a report and check that it is writable.

    Raises:
        ConfigError: it is not.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ConfigError(f"output directory {directory} cannot be written: {exc}") from exc


def in_full(write: Callable[[Path], Figures], directory: Path, figures: Callable[[], Figures]) -> tuple[Figures, Path]:
    """Write the files of a report; where their directory cannot take them all, write all into a temporary one.

    What was measured took minutes or hours, and a disk may fill up meanwhile. If no directory takes the files, their
    figures are printed on stdout.

    Args:
        figures: function that returns the content of the JSON file, which `write` returns too.

    Returns:
        The content, and the directory that has the files.

    Raises:
        SpecDecError: no directory takes them.
    """
    try:
        return write(directory), directory
    except OSError as exc:
        fault = f"{directory}: {exc.strerror or exc}"
    try:
        refuge = Path(tempfile.mkdtemp(prefix="specdec-report-"))
        content = write(refuge)
    except OSError:
        print(json.dumps(figures(), separators=(",", ":")), flush=True)
        raise SpecDecError(f"{fault}; all figures are on stdout instead: keep them as results.json") from None
    logger.error("%s. Nothing is lost: the report is drawn in %s; free some space, and move it", fault, refuge)
    return content, refuge


def write_report(findings: Findings, directory: Path) -> dict[str, Any]:
    """Write every file; return the content of results.json. Without matplotlib there is no picture and no page."""
    results = json_of(findings)
    (directory / "config.toml").write_text(findings.config.asked, encoding="utf-8")
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    _write_csv(results["cells"], directory / "results.csv")
    if findings.config.llmperf:
        write_llmperf(findings, directory / "llmperf")
    write_page(directory / "report.html", lambda: _page(findings, directory))
    return results


def write_page(file: Path, page: Callable[[], str]) -> None:
    """Write a page that needs matplotlib; without it, log a warning."""
    try:
        file.write_text(page(), encoding="utf-8")
    except ModuleNotFoundError as error:
        logger.warning("no %s: it needs the package %s, which is not installed", file.name, error.name)


def _page(findings: Findings, directory: Path) -> str:
    from specdec.comparison.report import html, plots  # matplotlib takes a second to import

    return html.render(findings, plots.draw_all(findings, directory))


def _write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
