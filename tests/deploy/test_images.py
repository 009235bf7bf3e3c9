"""Tests of the Dockerfiles and lock files in deploy/images, without a build.

`make images` builds the images.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from specdec.inference.config import ROOT
from tests.deploy.stand_ins import stand_in

pytestmark = pytest.mark.deploy

FOLDER = ROOT / "deploy" / "images"
RECIPES = sorted(FOLDER.glob("*.Dockerfile"))
LOCKS = ("cpu.lock", "cuda.lock")


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe.stem))
def test_a_recipe_keeps_the_rules(recipe: Path) -> None:
    done = subprocess.run(["hadolint", str(recipe)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)
    last_stage = recipe.read_text().rpartition("\nFROM ")[2]
    for line in ("USER 1000:1000", "STOPSIGNAL SIGTERM", "VOLUME /cache", "HEALTHCHECK", "LABEL org.opencontainers."):
        assert f"\n{line}" in last_stage
    assert 'ENTRYPOINT ["python3", "main.py"]' in last_stage
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", recipe.read_text(), re.MULTILINE):
        assert all(name.startswith("$") or (ROOT / name).exists() for name in copied.split())


def test_a_base_is_written_once_for_each_recipe() -> None:
    """Each Dockerfile names its base image, with digest, in one line; those for cpu and cuda have the same base."""
    bases = {}
    for recipe in RECIPES:
        [bases[recipe.stem]] = re.findall(r"^ARG BASE=(\S+)$", text := recipe.read_text(), re.MULTILINE)
        assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
        assert re.fullmatch(r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", bases[recipe.stem])
    assert bases["cpu"] == bases["cuda"]


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        ("No broken requirements found.", "No broken requirements found.", False),
        ("a 1 requires b", "a 1 requires b", False),
        ("a 1 requires b", "a 1 requires b\nlibneuronxla 2 requires protobuf<6, but you have 6.33", True),
        ("No broken requirements found.", "libneuronxla 2 requires protobuf<6, but you have 6.33", True),
    ],
)
def test_a_replaced_package_of_the_sdk_ends_the_build(before: str, after: str, replaced: bool, tmp_path: Path) -> None:
    """The build of the Neuron image fails if this project's packages replace or break a package of the SDK.

    Regression: pip installs the runtime on top of the SDK, and the build did not check whether the two still
    fit.
    """
    step = re.findall(r"^RUN (sed .*?[^\\])$", (FOLDER / "neuron.Dockerfile").read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "neuron.txt").write_text("# The runtime\nnumpy\n")
    report = f"test -e installed && said='{after}' || said='{before}'"
    stand_in(tmp_path, "python3", f'#!/bin/sh\n{report}\necho "$said"; case "$said" in No*) ;; *) exit 1 ;; esac\n')
    environment = stand_in(tmp_path, "install", "#!/bin/sh\ntouch installed\n") | {"INSTALL": "install"}
    done = subprocess.run(
        ["sh", "-c", step], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0, "libneuronxla" in done.stdout) == (replaced, replaced)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_that_of_the_requirements(name: str) -> None:
    """Each lock file has the versions that requirements files ask for, with hashes; `make lock` updates it."""
    files = ("requirements.txt", *(f"requirements/{extra}.txt" for extra in ("tracing", "endpoints", "cloudwatch")))
    wanted = {name: pin for file in files for name, pin in pins((ROOT / file).read_text()).items()}
    lock = (FOLDER / name).read_text()
    locked = pins(lock)
    differing = {each: (pin, locked.get(each)) for each, pin in wanted.items() if locked.get(each) != pin}
    assert differing == ({"torch": (wanted["torch"], f"{wanted['torch']}+cpu")} if name == "cpu.lock" else {})
    unhashed = [each for each in re.split(r"\n(?=\w)", lock)[1:] if "--hash=sha256:" not in each]
    assert unhashed == []
