"""Figures, files and the page: they agree, and the page needs nothing but itself."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from comparison.plan.backend import BackendConfig
from comparison.plan.config import ALONE, Contender, NetworkConfig, PromptSet, Topology, WorkloadConfig
from comparison.plan.datasets import Conversation
from comparison.plan.grid import Sample
from comparison.plan.record import RequestRecord
from comparison.report import html
from comparison.report.chart_style import save
from comparison.report.files import in_full, prepare_directory, write_report
from comparison.report.findings import Findings, conditions, json_of
from comparison.report.plots import PICTURES
from inference.config import ROOT, Emulation, PassTime
from inference.errors import ConfigError, SpecDecError
from inference.request import Schedule
from tests.support.samples import (
    BUSY,
    PASS_S,
    STEP_S,
    VERIFY_S,
    config,
    findings,
    model_directory,
    record,
    samples,
)

PAGE = ROOT / "comparison" / "report" / "page.html"
PNG_SIGNATURE = b"\x89PNG"


def _written(found: Findings) -> Path:
    directory = found.config.output
    prepare_directory(directory)
    write_report(found, directory)
    return directory


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every kind of picture."""
    directory = tmp_path_factory.mktemp("sweep")
    sets = (PromptSet("structured", ("1 2 3",)), PromptSet("open_ended", ("It was",)))
    settings = config(
        directory,
        draft_models=(str(model_directory(directory, "draft")), "ngram"),
        gammas=(1, 7),
        schedules=(Schedule.SYNC, Schedule.ASYNC),
        network=NetworkConfig(rtts_ms=(0.0, 10.0), jitter_ms=2.0, bandwidth_mbps=100.0),
        workload=WorkloadConfig(sets, num_runs=2, concurrencies=(1, 4), request_rates=(2.0,)),
    )
    return _written(findings(settings))


def test_speedup_is_run_by_run_with_its_spread(tmp_path: Path) -> None:
    """The second run is slower for all: speeds spread, their ratio does not."""
    found = findings(config(tmp_path))
    fused = found.best(Contender(Topology.FUSED), "structured", 0.0)
    assert fused is not None
    assert fused.speedup is not None
    expected = 3 * PASS_S / (3 * STEP_S + VERIFY_S)
    assert fused.speedup.low == pytest.approx(expected)
    assert fused.speedup.high == pytest.approx(expected)
    assert fused.tokens_per_s.high / fused.tokens_per_s.low == pytest.approx(1.1)
    assert fused.acceptance_rate == pytest.approx(2 / 3)
    assert fused.mean_acceptance_length == 3


def test_target_alone_reaches_its_bound(tmp_path: Path) -> None:
    alone = findings(config(tmp_path)).best(Contender(Topology.TARGET), "structured", 0.0)
    assert alone is not None
    assert alone.bound_tokens_per_s == pytest.approx(1 / PASS_S)
    assert alone.bound_speedup == 1.0
    assert alone.percent_of_bound == pytest.approx(50 + 50 / 1.1)  # median of the two runs


def test_without_the_target_there_is_no_speedup(tmp_path: Path) -> None:
    topologies = Topology.FUSED, Topology.DISTRIBUTED
    found = findings(config(tmp_path, topologies=topologies, network=NetworkConfig((0.0,))))
    assert all(summary.speedup is None and summary.bound_speedup is None for summary in found.summaries)
    assert (_written(found) / "report.html").is_file()


def test_csv_and_json_agree(sweep: Path) -> None:
    cells = json.loads((sweep / "results.json").read_text())["cells"]
    with (sweep / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(cells) == (1 + 4 * 2 * 2) * 2 * 2 * 3  # contenders, kinds, round trip times, loads
    for fields, cell in zip(rows, cells, strict=True):
        assert fields == {name: "" if value is None else str(value) for name, value in cell.items()}


def test_without_matplotlib_there_are_figures_but_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep of hours in a Neuron environment, which has none, lost everything when it was written."""
    for name in ("comparison.report.plots", "comparison.report.html"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    directory = _written(findings(config(tmp_path)))
    assert sorted(file.name for file in directory.glob("r*")) == ["results.csv", "results.json"]
    assert "no report.html: it needs the package matplotlib" in caplog.text


def test_page_contains_every_picture_and_asks_for_nothing(sweep: Path) -> None:
    page = _Page()
    page.feed((sweep / "report.html").read_text())
    pictures = {file.read_bytes() for file in sweep.glob("*.png")}
    assert len(pictures) == 6
    assert {base64.b64decode(source.partition(",")[2]) for source in page.images} == pictures
    assert all(picture.startswith(PNG_SIGNATURE) for picture in pictures)
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert page.requests == []


class _Page(HTMLParser):
    """Collects pictures, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []
        self.requests: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "img":
            self.images.append(values["src"] or "")
        elif values.get("src") or tag in ("link", "script", "iframe", "object"):
            self.requests.append(tag)

    def handle_data(self, data: str) -> None:
        if re.search(r"@import|url\(", data):
            self.requests.append(data)


def test_page_is_made_for_readers_without_mouse_or_sight(sweep: Path) -> None:
    """Landmarks, headings in order, captions and scopes, and text of pictures that says what they show."""
    text = (sweep / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert {"html", "header", "nav", "main", "section", "details"} <= {tag for tag, _ in page.tags}
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(deeper <= level + 1 for level, deeper in itertools.pairwise(levels))
    targets = {values["id"] for _, values in page.tags if "id" in values}
    links = [values["href"] for tag, values in page.tags if tag == "a"]
    assert links[0] == "#main"
    assert {link.removeprefix("#") for link in links if link} <= targets
    assert text.count("<table") == text.count("<caption>") > 2
    assert all(values.get("scope") in ("col", "row") for tag, values in page.tags if tag == "th")
    texts = [values["alt"] or "" for tag, values in page.tags if tag == "img"]
    assert all(re.search(r"structured, .*\d", shown) for shown in texts)


@pytest.mark.parametrize("name", ["ink", "dim", "link"])
def test_colours_of_text_have_contrast(name: str) -> None:
    """WCAG AA: 4.5 to 1 on white and on the stripes."""
    found = dict(re.findall(r"--(\w+): #(\w{6})", PAGE.read_text()))
    assert all(_contrast(found[name], background) >= 4.5 for background in ("ffffff", found["soft"]))


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_picture_has_its_conditions(sweep: Path) -> None:
    """In the page below each; in the picture itself, which is shown without its page too, as the legend's title."""
    text = (sweep / "report.html").read_text()
    captions = re.findall("<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    assert len(captions) == 6
    for words in (
        "cores per model",
        "1 structured of 5 characters, 1 open_ended",
        "greedy",
        "1, 4 in flight",
        "0, 10 ms",
        "2 runs",
    ):
        assert all(words in caption for caption in captions)


def test_pictures_say_their_conditions_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    found = findings(config(tmp_path))
    for picture in PICTURES:
        if picture.finding(found):
            save(picture.draw(found), tmp_path / "picture.png", found.config)
    assert len(saved) == 3
    assert all("2 runs" in figure.legends[0].get_title().get_text() for figure in saved)


def test_page_states_pinning_network_and_verdict(sweep: Path) -> None:
    text = (sweep / "report.html").read_text()
    for words in ("target side: core 0", "edge: core 1", "jitter up to 2 ms", "100 Mbit/s", "same tokens: all"):
        assert words in text


def test_page_escapes_what_users_name(tmp_path: Path) -> None:
    sets = (PromptSet("<b>kind", ("text",)),)
    found = findings(config(tmp_path, network=NetworkConfig((0.0,)), workload=WorkloadConfig(sets, num_runs=1)))
    assert "<b>kind" not in (_written(found) / "report.html").read_text().lower()


def test_unwritable_directory_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_directory(tmp_path / "file" / "report")


def test_files_say_that_they_are_emulated(tmp_path: Path) -> None:
    """A table cut out of the page, or a row of the CSV file, must not pass for this machine's figures."""
    settings = config(
        tmp_path, network=NetworkConfig((0.0,)), backend=BackendConfig(emulation=Emulation(PassTime(0.025)))
    )
    written = _written(findings(settings))
    page = (written / "report.html").read_text()
    assert page.count("EMULATED") >= 4  # above all, above the tables of two kinds, in the conditions
    results = json.loads((written / "results.json").read_text())
    assert results["emulated"] == "target:25ms"
    with (written / "results.csv").open() as file:
        assert {row["emulated"] for row in csv.DictReader(file)} == {"target:25ms"}


def test_conditions_separate_prompt_lengths_and_backends(tmp_path: Path) -> None:
    """Reports of 10 and of 1000 input tokens, of torch and of ONNX, had the same conditions: nobody learned of it, and
    `diff` called one slower than the other."""
    prompts = ("x" * 40, Conversation(("y" * 4, "z"), "s"))
    settings = config(tmp_path, workload=WorkloadConfig((PromptSet("k", prompts),), num_runs=1))
    found = dict(conditions(settings))
    assert found["Prompts"].startswith("2 k of 6 to 40 characters; up to 96 output tokens")
    assert "Backend" not in found
    torch = BackendConfig("torch", dtype="bfloat16")
    assert dict(conditions(replace(settings, backend=torch)))["Backend"] == "torch --dtype=bfloat16"
    mixed = BackendConfig("torch", "auto")
    assert dict(conditions(replace(settings, backend=mixed)))["Backend"] == "torch, of drafts auto"


def test_a_busy_machine_is_named_above_all_figures(tmp_path: Path) -> None:
    """The story: at a load average of 24 on two cores a report had no warning, and no load among its conditions."""
    found = findings(config(tmp_path), load=BUSY)
    results = json.loads((_written(found) / "results.json").read_text())
    assert results["load"] == {"before": 24.0, "after": 23.0, "num_cores": 2, "other_cores": 1.1, "spread": 1.1}
    assert results["conditions"]["Host load"] == str(BUSY)
    (warning,) = results["warnings"]
    assert all(figure in warning for figure in ("24.0", "1.10 of 2 cores", "a factor of 1.10"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.index(f'<p class="verdict bad">{warning}') < page.index("In short</h2>")


def test_widely_differing_runs_mean_busy(tmp_path: Path) -> None:
    measured = samples(config(tmp_path))
    assert findings(config(tmp_path), measured).warnings == []
    slow = [replace(it, records=tuple(slowed(it, 4.0))) if it.repeat else it for it in measured]
    (warning,) = findings(config(tmp_path), slow).warnings
    assert "equal runs differ by a factor of 4" in warning


def test_a_client_without_time_of_its_own_is_named(tmp_path: Path) -> None:
    """The story: at 32 streams the client read first tokens three times as late as the server sent them, and the
    report presented this as the server's."""
    measured = samples(config(tmp_path))
    half = [replace(it, client_share=0.5) for it in measured]
    assert findings(config(tmp_path), half).warnings == []
    busy = [replace(it, client_share=0.82) if it.cell == measured[1].cell else it for it in half]
    found = findings(config(tmp_path), busy)
    (warning,) = found.warnings
    assert warning.startswith(f"The client itself used 82% of a core at {measured[1].cell}: ")
    shares = {cell["client_share"] for cell in json.loads((_written(found) / "results.json").read_text())["cells"]}
    assert shares == {0.5, 0.82}


def slowed(sample: Sample, factor: float) -> list[RequestRecord]:
    contender, rtt_ms = sample.cell.contender, sample.cell.rtt_ms
    return [record(contender, rtt_ms=rtt_ms, prompt_index=it.prompt_index, slowdown=factor) for it in sample.records]


def test_prompts_that_one_server_had_kept_are_named(tmp_path: Path) -> None:
    """The story: the baseline went on from kept prefixes, a fused graph cannot, and TTFTs stood side by side."""
    measured = samples(config(tmp_path))
    kept = [replace(it, records=tuple(replace(each, num_cached_tokens=3) for each in it.records)) for it in measured]
    assert findings(config(tmp_path), kept).warnings == []
    alike = [each if each.cell.contender == ALONE else old for old, each in zip(measured, kept, strict=True)]
    (warning,) = findings(config(tmp_path), alike).warnings
    assert warning.startswith("target had kept up to 75% of its prompts' tokens, fused (draft draft, gamma 3) 0%")
    assert "--no-prefix_caching" in warning


def test_whose_requests_failed_is_said_beside_the_speed(tmp_path: Path) -> None:
    """Only a column of the second table had it: the page led with the speed of what had been answered."""
    measured = samples(config(tmp_path))
    failed = RequestRecord(0, 0.0, 0, (), (), "500", "boom", failed_s=1.0)
    measured[1] = replace(measured[1], failures=(failed,))
    found = findings(config(tmp_path), measured)
    num_asked = 1 + 2 * len(measured[1].records)
    told = f"{measured[1].cell}: 1 of {num_asked} requests failed, latencies are those of others"
    assert found.warnings == [told]
    assert told in (_written(found) / "report.html").read_text()


FULL = Path("/dev/full")
"""File that takes no byte, as on a full disk."""
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here, which only Linux has")


@needs_a_full_disk
@pytest.mark.parametrize("name", ["results.json", "report.html"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The story: a comparison on a full disk ended in a traceback, and no line named what was left of it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    found = findings(config(tmp_path))
    prepare_directory(found.config.output)
    (found.config.output / name).symlink_to(FULL)
    results, output = in_full(partial(write_report, found), found.config.output, partial(json_of, found))
    assert output.parent == tmp_path / "elsewhere"
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (output / "report.html").stat().st_size > 10_000
    (line,) = caplog.messages
    assert str(found.config.output) in line
    assert "No space left on device" in line
    assert str(output) in line


@needs_a_full_disk
def test_figures_that_no_disk_takes_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    found = findings(config(tmp_path))
    prepare_directory(found.config.output)
    (found.config.output / "results.json").symlink_to(FULL)
    with pytest.raises(SpecDecError, match="No space left on device; all figures are on stdout"):
        in_full(partial(write_report, found), found.config.output, partial(json_of, found))
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(json_of(found)))


def test_in_short_ends_with_commands_that_serve(tmp_path: Path) -> None:
    """The made-up servers with a draft are twice as fast at 0 ms; those over a link lose at 200 ms."""
    found = findings(
        config(tmp_path, topologies=(Topology.TARGET, Topology.DISTRIBUTED), network=NetworkConfig((0, 200)))
    )
    sentences = re.findall("<li>(What to run.*?)</li>", html.render(found, []))
    assert [sentence.partition(". ")[0] for sentence in sentences] == [
        "What to run at round trips of 0 ms (2.00 times): distributed sync (draft draft, gamma 3)",
        "What to run at round trips of 200 ms: the target alone",
    ]
    busy = findings(found.config, load=BUSY)
    assert "What to run: these figures cannot say" in html.render(busy, [])
