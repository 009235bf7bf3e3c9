"""Tests that AWS's software has the versions of one row of the table in docs/neuron.md, in all files and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from specdec.inference.backends.neuron.environment import IMAGE, OLDEST_NXDI

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "neuron.md").read_text(encoding="utf-8")
KUBERNETES = ROOT / "deploy" / "kubernetes"
OLDEST_NODE = Version("1.34.2")
"""Oldest Kubernetes that nodes may have: on 1.34.0 and 1.34.1 AWS supports no resource claims (issue 133920)."""
NODES = "EKS node AMI, Kubernetes 1.34 and 1.35"
IMAGES = re.compile(r"pytorch-inference-neuronx:2\.9\.0-neuronx-py312-sdk([\d.]+)-ubuntu24\.04")

Row = dict[str, str]


def table(text: str) -> dict[str, Row]:
    """Return the rows of the table "What fits what" in docs/neuron.md, by the version of the container's SDK."""
    lines = text.partition("### What fits what")[2].partition("\n\n|")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    found = [dict(zip(head, row, strict=True)) for row in rows]
    return {row["SDK"]: row for row in found if row["container"] != "none"}


def fault(row: Row) -> str:
    """Return a sentence about why AWS's rules forbid a row's runtime with its driver; "" if they fit together."""
    runtime, driver = Version(row["runtime"]), Version(row["driver"])
    if driver >= Version("2.29") and runtime < Version("2.33"):
        return f"driver {driver} needs runtime 2.33, the image has {runtime}"
    if Version("2.32") <= runtime < Version("2.33") and driver < Version("2.27"):
        return f"runtime {runtime} needs a driver after 2.26, the host has {driver}"
    return ""


TABLE = table(PAGE)


def base() -> str:
    """Return the version of the Neuron SDK in the base image of deploy/images/neuron.Dockerfile."""
    (sdk,) = IMAGES.findall((ROOT / "deploy" / "images" / "neuron.Dockerfile").read_text())
    return str(sdk)


def nodes(folder: str) -> str:
    """Return the release of the AMI in the node class in deploy/kubernetes/nodes/`folder`."""
    (term,) = yaml.safe_load((KUBERNETES / "nodes" / folder / "node-class.yaml").read_text())["spec"][
        "amiSelectorTerms"
    ]
    return str(term["alias"]).removeprefix("al2023@")


def test_the_node_has_the_driver_of_the_image() -> None:
    """The nodes' AMI and Kubernetes release are those that docs/neuron.md has for the image's SDK.

    Regression: nodes had the driver of SDK 2.26 and Kubernetes 1.34.1, where AWS supports no resource claims.
    """
    cluster = yaml.safe_load((KUBERNETES / "cluster" / "cluster.yaml").read_text())["metadata"]["version"]
    assert cluster in re.findall(r"1\.\d+", NODES)
    releases = re.findall(r"v\d{8}", TABLE[base()][NODES])
    assert releases[0] <= nodes("base") <= releases[-1]
    assert nodes("drafts") == nodes("base")


@pytest.mark.parametrize("sdk", TABLE)
def test_runtime_and_driver_of_each_sdk_fit(sdk: str) -> None:
    row = TABLE[sdk]
    assert row["container"] == f"`sdk{sdk}`"
    assert fault(row) == ""
    assert sdk.startswith(row["AMI"].removeprefix("SDK "))
    assert Version(row["NxDI"]).release >= OLDEST_NXDI
    assert min(map(Version, re.findall(r"1\.34\.\d+", row[NODES]))) >= OLDEST_NODE


def test_runtimes_and_drivers_that_do_not_fit_are_found() -> None:
    """The check of runtime and driver finds a driver that is too old for its runtime, and one that is too new."""
    old, new = TABLE["2.29.1"], TABLE["2.31.1"]
    assert "needs runtime 2.33" in fault({**old, "driver": new["driver"]})
    assert "after 2.26" in fault({**TABLE["2.30.0"], "driver": "2.24.7"})


FILES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "specdec").rglob("*.py"),
    *(each for each in (ROOT / "deploy").rglob("*") if each.suffix in {".yaml", ".sh", ".Dockerfile", ".env"}),
]


def test_every_image_that_is_named_is_in_the_table() -> None:
    named = {sdk for file in FILES for sdk in IMAGES.findall(file.read_text(encoding="utf-8"))}
    short = {sdk for file in FILES for sdk in re.findall(r"`sdk(\d[\d.]+)`", file.read_text(encoding="utf-8"))}
    assert named | short <= set(TABLE)
    assert IMAGES.findall(IMAGE) == [base()]


def test_the_drivers_chart_is_pinned_and_knows_the_claims() -> None:
    """The Helm chart of the Neuron driver has a pinned version, which supports the manifests' resource claims.

    Regression: the claims named an API version of the private beta, and the chart's version was not pinned.
    """
    walk = (ROOT / "docs" / "eks.md").read_text(encoding="utf-8")
    (chart,) = re.findall(r"neuron-helm-chart --version (\d+\.\d+\.\d+) ", walk)
    assert [row["SDK"] for row in TABLE.values() if row["Helm chart"] == chart] == ["2.31.1"]
    assert f"Chart {chart} is that of SDK 2.31 " in walk
    (said,) = re.findall(r"`(neuron\.aws\.com/v\w+)`", walk)
    for name in ("xl", "xxl"):
        claim = yaml.safe_load((KUBERNETES / "components" / "claims" / name / "claim.yaml").read_text())
        (settings,) = claim["spec"]["spec"]["devices"]["config"]
        assert settings["opaque"]["parameters"]["apiVersion"] == said
