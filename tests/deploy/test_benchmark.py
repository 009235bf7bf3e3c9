"""Tests of the Jobs in deploy/kubernetes/benchmark: their commands, with real servers, and stand-ins for the rest."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.inference.config import ROOT, model_name
from specdec.inference.gateway.bodies.schema import ChatBody
from specdec.inference.serving.processes import free_port, server_process
from tests.deploy.cloudwatch import CloudWatch, python_with_boto3
from tests.deploy.consistency import pod_of
from tests.deploy.kustomize import KUBERNETES, Manifest, manifests, of_kind
from tests.deploy.stand_ins import stand_in
from tests.test_tutorials import LLMPERF

pytestmark = pytest.mark.deploy

NUM_CASES = 9
OWN_LINE = "Shall I compare thee to a summer's day?"
"""Text that replaces the one LLMPerf ships, from which the Job makes one more test case than from its own files."""
METRICS = {
    *("TTFT", "InterTokenLatency", "EndToEndLatency", "InputTokens", "OutputTokens", "RequestOutputThroughput"),
}
PYTHON = """#!/bin/sh
case $1 in
    *publish.py) exec "{publishing}" "$@" ;;
    *) exec "{measuring}" "$@" ;;
esac
"""
"""Script instead of the image's Python: publish.py runs in the environment with boto3, all else in the project's."""
BENCHMARK = """#!/bin/sh
case $1 in *publish.py) echo "published $2 $3" >> "$TOLD"; exit 0 ;; esac
for word in "$@"; do echo "$word"; done >> "$TOLD"
echo "base $OPENAI_API_BASE" >> "$TOLD"
sort -u "${LLMPERF_LINES:-$OWN_LINES}" >> "$TOLD"
for word in "$@"; do
    case $word in --results-dir=*) mkdir -p "${word#*=}"; touch "${word#*=}/a_summary.json" ;; esac
done
"""


class Pod:
    """The only container of the Job `name`: its command on this machine, variables, and files in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._documents = manifests(KUBERNETES / "benchmark")
        (self.job,) = (job for job in of_kind(self._documents, "Job") if job["metadata"]["name"] == name)
        self.container: Manifest = pod_of(self.job)["containers"][0]
        self.variables = self._map("benchmark")
        self.cases = self._map("cases")
        (folder / "cases").mkdir()
        for file, text in self.cases.items():
            (folder / "cases" / file).write_text(text)
        self._access = folder / "access"
        self._access.mkdir()
        (self._access / "client").write_text("not-asked-for\n")
        self.paths = {"CASES": str(folder / "cases"), "RESULTS": str(folder / "results")}
        self.paths |= {"SCRIPT": str(ROOT / "deploy" / "cloudwatch" / "publish.py"), "LLMPERF_HOME": str(folder)}
        self.paths |= {"KEEP": str(folder / "kept"), "LLMPERF": str(ROOT / "deploy" / "llmperf")}

    def _map(self, name: str) -> dict[str, str]:
        found = (each for each in of_kind(self._documents, "ConfigMap") if each["metadata"]["name"].startswith(name))
        data: dict[str, str] = next(found)["data"]
        return data

    def run(self, environment: Mapping[str, str], *further: str) -> subprocess.CompletedProcess[str]:
        """Run the Job's command to its end; `further` flags are added, and override its own."""
        shell, script = self.container["command"]
        own = [word.replace("/access/", f"{self._access}/") for word in self.container["args"]]
        command = [shell, str(KUBERNETES / "benchmark" / Path(script).name), *own, *further]
        known = {**environment, **self.variables, **self.paths}
        return subprocess.run(command, env=known, cwd=ROOT, capture_output=True, text=True, check=False)


@asynccontextmanager
async def both_servers() -> AsyncGenerator[str]:
    """Run a target without a draft, and one with; yield the value for ENDPOINTS that names both."""
    base, sd, *ports = (free_port() for _ in range(4))
    flags = ["--threads=1", "--log_level=warning"]
    async with (
        server_process("Base", "target", *flags, f"--http_port={base}", f"--port={ports[0]}", port=ports[0]),
        server_process("SD", "fused_target", *flags, f"--http_port={sd}", f"--port={ports[1]}", port=ports[1]),
    ):
        yield f"Base=http://127.0.0.1:{base}/v1 SD=http://127.0.0.1:{sd}/v1"


async def test_both_endpoints_are_measured_and_published(tmp_path: Path, cloudwatch: CloudWatch) -> None:
    pod = Pod("measure", tmp_path)
    python = PYTHON.format(publishing=python_with_boto3(), measuring=sys.executable)
    environment = cloudwatch.environment | {"PATH": stand_in(tmp_path, "python3", python)["PATH"]}
    async with both_servers() as pod.variables["ENDPOINTS"]:
        done = await asyncio.to_thread(pod.run, environment, "--max_new_tokens=6", "--num_runs=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"emulated"')  # as docs/kubernetes.md has it
    places = {(variant, Path(case).stem) for variant in ("Base", "SD") for case in pod.cases}
    assert len(places) == 2 * NUM_CASES
    assert {(cell["endpoint"], cell["kind"]) for cell in json.loads(done.stdout)["statistics"]} == places
    seconds = cloudwatch.values("Qwen/LLMPerf", "Seconds")
    assert {key[:2] for key in seconds} == places
    assert {key[2] for key in cloudwatch.values("Qwen/LLMPerf", "Count/Second")} | {key[2] for key in seconds} == (
        METRICS - {"InputTokens", "OutputTokens"}
    )
    counts = cloudwatch.values("Qwen/LLMPerf", "Count")
    assert {key: set(found) for key, found in counts.items() if key[2] == "OutputTokens"} == {
        (*place, "OutputTokens"): {6.0} for place in places
    }
    (kept,) = (tmp_path / "kept").iterdir()
    assert {"results.json", "report.html"} <= {file.name for file in kept.iterdir()}
    for place in places:
        assert 0 < min(seconds[*place, "TTFT"]) <= max(seconds[*place, "EndToEndLatency"])


def test_nothing_is_published_of_endpoints_that_are_not_there(tmp_path: Path) -> None:
    """If no endpoint answers, the Job publishes nothing, not even the results that an earlier run left."""
    pod = Pod("measure", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results.json").touch()
    pod.variables["ENDPOINTS"] = f"Base=http://127.0.0.1:{free_port()}/v1"
    environment = stand_in(tmp_path, "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = pod.run(environment, "--max_new_tokens=6")
    assert (done.returncode, done.stdout) == (1, "")
    assert "endpoint Base" in done.stderr
    assert "results.json" not in done.stderr


@pytest.mark.parametrize("published", [0, 1])
def test_differences_are_published_and_fail_the_job(published: int, tmp_path: Path) -> None:
    """If the answers of the two servers differ, the Job still measures and publishes, then ends with exit code 1.

    Answers that part where two tokens are almost equally probable do not count as different.
    """
    measured = (
        'results=$(echo "$*" | sed "s/.*--output=//"); mkdir -p "$results"; touch "$results/results.json"; exit 1'
    )
    python = f'#!/bin/sh\ncase $1 in *publish.py) echo "$@" ; exit {published} ;; *) {measured} ;; esac\n'
    pod = Pod("measure", tmp_path)
    done = pod.run(stand_in(tmp_path, "python3", python))
    assert done.returncode == 1
    assert done.stdout.split()[1:] == [str(tmp_path / "results" / "results.json"), "--namespace=Qwen/LLMPerf"]


def told_to_llmperf(folder: Path, program: str = BENCHMARK) -> tuple[Pod, subprocess.CompletedProcess[str]]:
    """Run the command of the Job `llmperf` with a script in place of LLMPerf, which records its arguments.

    The Job finds LLMPerf installed already, and runs it by `program`, a script that replaces Python. Return the Job's
    pod, and the result of the command.
    """
    (folder / "venv").mkdir()
    stand_in(folder / "venv", "python", program)
    (folder / ".installed").touch()
    pod = Pod("llmperf", folder)
    (folder / "sonnet.txt").write_text(OWN_LINE)
    environment = {**os.environ, "TOLD": str(folder / "told"), "PUBLISHING": str(python_with_boto3())}
    environment["OWN_LINES"] = str(folder / "sonnet.txt")
    return pod, pod.run(environment)


def test_llmperf_gets_every_case_at_every_endpoint(tmp_path: Path) -> None:
    """The Job runs LLMPerf once for every test case at every endpoint, with flags that its pinned version has.

    Regression: the Job left out the one long load of AWS's sample.
    """
    pod, done = told_to_llmperf(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "told").read_text().splitlines()
    bases = [endpoint.partition("=")[2] for endpoint in pod.variables["ENDPOINTS"].split()]
    assert [line for line in lines if line.startswith("base ")] == [f"base {base}" for base in bases] * (NUM_CASES + 1)
    texts = [*(text for _, text in sorted(pod.cases.items())), OWN_LINE]
    cases = [text for text in texts for _ in bases]
    assert [lines[at + 1] for at, line in enumerate(lines) if line.startswith("base ")] == cases
    flags = [line.removeprefix("--").partition("=") for line in lines if line.startswith("--")]
    assert {name for name, _, _ in flags} <= LLMPERF
    folders = [value for name, _, value in flags if name == "results-dir"]
    assert len(set(folders)) == len(bases) * (NUM_CASES + 1)
    assert [line for line in lines if line.startswith("published ")] == [
        f"published {folder} {pod.variables['PUBLISH']}" for folder in folders
    ]
    places = [tuple(Path(folder).parts[-2:]) for folder in folders]
    metadata = [f"variant={variant},test_case={case}" for variant, case in places]
    assert [value for name, _, value in flags if name == "metadata"] == metadata
    kept = sorted((tmp_path / "kept").rglob("*_summary.json"))
    assert sorted(tuple(file.parent.parts[-2:]) for file in kept) == sorted(places)
    sampling = {value for name, _, value in flags if name == "additional-sampling-params"}
    body = {"messages": [{"role": "user", "content": "a"}], **json.loads(sampling.pop())}
    assert ChatBody.model_validate(body).temperature == 0


def test_a_run_of_llmperf_that_fails_does_not_end_the_job(tmp_path: Path) -> None:
    """If one run of LLMPerf fails, the Job still does and publishes all other runs, and then ends with an error."""
    failing = BENCHMARK.replace("\nfor word", "\ncase $* in *variant=SD,test_case=json*) exit 1 ;; esac\nfor word", 1)
    pod, done = told_to_llmperf(tmp_path, failing)
    assert done.returncode == 1
    told = (tmp_path / "told").read_text()
    assert (
        told.count("published ") == told.count("base ") == len(pod.variables["ENDPOINTS"].split()) * (NUM_CASES + 1) - 1
    )


def test_llmperf_is_edited_once_or_not_at_all(tmp_path: Path) -> None:
    """The Job's edits of LLMPerf's sources are made once; made again, or on other sources, they are refused.

    Files with only the passages that the Job replaces stand in for LLMPerf's sources.
    """
    from deploy.llmperf.edits import EDITS

    for name in {name for name, *_ in EDITS}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(old * count for each, count, old, _ in EDITS if each == name))
    edit = [sys.executable, str(ROOT / "deploy" / "llmperf" / "edits.py"), str(tmp_path)]
    assert subprocess.run(edit, check=False).returncode == 0
    edited = {name: (tmp_path / name).read_text() for name, *_ in EDITS}
    assert [new for name, _, _, new in EDITS if new not in edited[name]] == []
    again = subprocess.run(edit, capture_output=True, text=True, check=False)
    assert (again.returncode, "0 times instead of 1" in again.stderr) == (2, True)
    assert {name: (tmp_path / name).read_text() for name, *_ in EDITS} == edited


def endpoints_of(documents: Sequence[Manifest]) -> list[str]:
    found = [each["data"]["ENDPOINTS"] for each in documents if "ENDPOINTS" in each.get("data", {})]
    return str(found[0]).split()


def test_the_jobs_ask_services_of_the_overlays(tmp_path: Path) -> None:
    documents = manifests(KUBERNETES / "benchmark")
    models = {each["data"]["MODEL"] for each in documents if "MODEL" in each.get("data", {})}
    for endpoint in endpoints_of(documents):
        service, namespace = endpoint.partition("http://")[2].partition(":")[0].split(".")
        overlay = manifests(KUBERNETES / "overlays" / namespace.removeprefix("specdec-"))
        assert service in {each["metadata"]["name"] for each in of_kind(overlay, "Service")}
        assert overlay[0]["metadata"]["name"] == namespace
        served = {each["data"]["TARGET_MODEL"] for each in overlay if "TARGET_MODEL" in each.get("data", {})}
        assert {model_name(Path(model)) for model in served} == models


def test_the_jobs_do_not_run_at_once() -> None:
    """Job `measure` starts when it is applied; Job `llmperf` is suspended until someone resumes it."""
    jobs = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests(KUBERNETES / "benchmark"), "Job")}
    assert {name: spec.get("suspend", False) for name, spec in jobs.items()} == {"measure": False, "llmperf": True}
    images = {name: spec["template"]["spec"]["containers"][0]["image"] for name, spec in jobs.items()}
    assert images["llmperf"].startswith("docker.io/library/python:")
    assert ".amazonaws.com/specdec-cpu:" in images["measure"]
