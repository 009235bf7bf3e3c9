"""Tests that the commands in deploy/compose and deploy/systemd parse, and that servers have time to finish requests."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.inference import VERSION
from specdec.inference.config import ROOT
from tests.deploy.consistency import check_arguments, needed_s
from tests.test_tutorials import check_role

pytestmark = pytest.mark.deploy

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
SERVERS = [name for name in COMPOSE["services"] if name != "tokens"]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))


def with_defaults(text: str) -> str:
    """Return compose.yaml with its variables replaced by their default values, as without an .env file."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def arguments_of(service: str) -> dict[str, str]:
    words = [with_defaults(word) for word in COMPOSE["services"][service]["command"]]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


@pytest.mark.parametrize("service", SERVERS)
def test_a_service_of_compose_takes_its_command(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments, settings = arguments_of(service), COMPOSE["services"][service]
    check_arguments(arguments)
    if "--grace_s" in arguments:
        assert int(settings["stop_grace_period"].removesuffix("s")) > needed_s(arguments)
    if "--probe_port" in arguments:
        assert f":{arguments['--probe_port']}/readyz" in settings["healthcheck"]["test"][-1]
    assert (settings["read_only"], settings["cap_drop"]) == (True, ["ALL"])


def test_images_of_compose_have_the_version() -> None:
    assert {with_defaults(each["image"]) for each in COMPOSE["services"].values()} == {f"specdec-cpu:{VERSION}"}
    assert f"IMAGE=specdec-cpu:{VERSION}\n" in (ROOT / "deploy" / "compose" / ".env.example").read_text()


def test_compose_builds_what_it_starts() -> None:
    """One service in compose.yaml builds the image, and every other service waits for that one.

    Regression: no service had a `build`, and the image is in no registry, so `docker compose up` ended with an error.
    """
    services = COMPOSE["services"]
    (builder,) = [name for name, each in services.items() if "build" in each]
    context = (ROOT / "deploy" / "compose" / services[builder]["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / services[builder]["build"]["dockerfile"]).is_file()
    for name in SERVERS:
        after = [name]
        while after[-1] != builder:
            (before,) = services[after[-1]]["depends_on"]
            after.append(before)
    assert {each["pull_policy"] for each in services.values()} == {"never"}


def test_services_of_compose_name_each_other() -> None:
    assert arguments_of("draft")["--attach"] == f"target:{arguments_of('target')['--port']}"
    assert arguments_of("gateway")["--target_host"] == "target"
    assert arguments_of("gateway")["--port"] == arguments_of("target")["--port"]
    example = (ROOT / "deploy" / "compose" / ".env.example").read_text()
    variables = set(re.findall(r"\$\{(\w+):-", (ROOT / "deploy" / "compose" / "compose.yaml").read_text()))
    assert set(re.findall(r"^(\w+)=", example, re.MULTILINE)) <= variables


def test_compose_makes_tokens_by_our_own_role() -> None:
    script = COMPOSE["services"]["tokens"]["command"][0]
    lines = [line.partition(">")[0] for line in script.splitlines() if "main.py" in line]
    for line in lines:
        check_role(shlex.split(line)[2:])
    assert len(lines) == 2


def service_of(unit: Path) -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(unit.read_text())
    return parsed["Service"]


def test_units_share_the_memory_of_one_machine() -> None:
    """The memory limits of the systemd units that run on one machine add up to no more than the machine has.

    Regression: no unit had a limit, so a leak in one let the kernel choose which of the three to kill.
    """
    services = [service_of(unit) for unit in UNITS]
    assert sum(int(each["MemoryMax"].removesuffix("%")) for each in services) <= 100
    assert {(each["OOMPolicy"], each["Restart"]) for each in services} == {("kill", "on-failure")}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_takes_its_command(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    service, role = service_of(unit), unit.stem.removeprefix("specdec-")
    assert service["EnvironmentFile"] == f"/etc/specdec/{role}.env"
    flags = re.findall(r"^FLAGS=(.*)$", (unit.parent / f"{role}.env").read_text(), re.MULTILINE)[0]
    words = shlex.split(service["ExecStart"].replace("$FLAGS", flags))
    assert words[1:4] == ["main.py", "--role", role]
    arguments = dict(zip(words[2::2], words[3::2], strict=True))
    check_arguments(arguments)
    assert int(service["TimeoutStopSec"]) > needed_s(arguments)


def complaints_of_systemd(folder: Path) -> list[str]:
    """Return what `systemd-analyze verify` finds wrong in the units, with paths replaced by those of this machine."""
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("there is no systemd-analyze")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/specdec/.venv/bin/python", "/bin/true").replace("=/opt/specdec", "=/")
        text = re.sub(r"^(User|Group|EnvironmentFile)=.*$", "", text, flags=re.MULTILINE)
        (folder / unit.name).write_text(text)
    command = [program, "verify", "--man=no", "--recursive-errors=no", *sorted(folder.glob("*.service"))]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "specdec-" in line]


def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    assert complaints_of_systemd(tmp_path) == []
