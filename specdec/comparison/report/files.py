"""Files of a report: results.csv, results.json, the pictures and report.html."""

from __future__ import annotations

import csv
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.report.findings import Findings, cells_of
from specdec.comparison.report.llmperf import write_llmperf
from specdec.inference.errors import ConfigError, SpecDecError

logger = logging.getLogger(__name__)
Figures: TypeAlias = dict[str, Any]


def prepare_directory(directory: Path) -> None:
    """Create the directory of a report and check that it is writable.

    Raises:
        ConfigError: the directory cannot be created, or is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ConfigError(f"output directory {directory} cannot be written: {exc}") from exc


def in_full(config: ComparisonConfig, name: str, figures: Figures, write: Callable[[Path], None]) -> Path:
    """Write the files of a report; if their directory cannot take them all, write all into a temporary one.

    The measurement took minutes or hours, and must not be lost because the disk has filled up meanwhile. If the
    temporary directory cannot take the files either, the figures are printed on stdout as JSON.

    Args:
        name, figures: name and content of the JSON file.
        write: function that writes the other files, except for config.toml, into a directory.

    Returns:
        The directory that has the files.

    Raises:
        SpecDecError: no directory takes them.
    """

    def written(directory: Path) -> Path:
        (directory / "config.toml").write_text(config.asked, encoding="utf-8")
        (directory / name).write_text(json.dumps(figures, indent=1) + "\n")
        write(directory)
        return directory

    try:
        return written(config.output)
    except OSError as exc:
        fault = f"{config.output}: {exc.strerror or exc}"
    try:
        refuge = written(Path(tempfile.mkdtemp(prefix="specdec-report-")))
    except OSError:
        print(json.dumps(figures, separators=(",", ":")), flush=True)
        raise SpecDecError(f"{fault}; all figures are on stdout instead: keep them as results.json") from None
    logger.error("%s. Nothing is lost: the report is drawn in %s; free some space, and move it", fault, refuge)
    return refuge


def write_report(findings: Findings, directory: Path) -> None:
    """Write a comparison's files except results.json; without matplotlib, write neither pictures nor the HTML page."""
    _write_csv(cells_of(findings), directory / "results.csv")
    if findings.config.llmperf:
        write_llmperf(findings, directory / "llmperf")
    page = directory / "report.html"
    with_matplotlib(page, lambda: page.write_text(_page(findings, directory), encoding="utf-8"))


def with_matplotlib(file: Path, write: Callable[[], object]) -> bool:
    """Call the function that writes a file with matplotlib, and return True.

    If this package is not installed, log a warning that names the file, and return False.
    """
    try:
        write()
    except ModuleNotFoundError as error:
        logger.warning("no %s: it needs the package %s, which is not installed", file.name, error.name)
        return False
    return True


def _page(findings: Findings, directory: Path) -> str:
    from specdec.comparison.report import html, plots  # matplotlib takes a second to import

    return html.render(findings, plots.draw_all(findings, directory))


def _write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
