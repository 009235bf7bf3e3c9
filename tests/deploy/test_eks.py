"""Tests of the commands in docs/eks.md, run in a shell; AWS's own command line calls moto, a stand-in for AWS.

No AWS account has run them. Programs that need a cluster are replaced by scripts that record their arguments.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.inference.config import ROOT
from tests.deploy.cloudwatch import CloudWatch
from tests.deploy.kustomize import COMPILED, KUBERNETES, Manifest, manifests, need_kubectl, of_kind, text_of
from tests.deploy.stand_ins import stand_in

pytestmark = pytest.mark.deploy

WALK = (ROOT / "docs" / "eks.md").read_text(encoding="utf-8")
UNKNOWN_TO_MOTO = {("cloudformation", "deploy"), ("cloudformation", "delete-stack"), ("ec2", "run-instances")}
"""AWS commands, as (service, operation), that moto cannot answer as AWS would; only their arguments are checked."""
REFUSED = ("usage:", "Unknown options", "Parameter validation failed", "Error parsing parameter", "Invalid JSON")
"""Beginnings of the messages by which AWS's command line refuses arguments, before it sends anything."""
AWS = """#!/bin/sh
"{aws}" "$@" 2> "$LOG/error"
code=$?
cat "$LOG/error" >> "$LOG/errors"
echo "$code $*" | tr '\\n' ' ' >> "$LOG/aws"; echo >> "$LOG/aws"
exit $code
"""
OTHER = """#!/bin/sh
if [ "$1" = kustomize ]; then exec "{kubectl}" "$@"; fi
echo "$(basename "$0") $*" >> "$LOG/others"
case "$*" in *--config-file\\ -*) cat > "$LOG/cluster.yaml" ;; *--password-stdin*) cat > "$LOG/password" ;; esac
"""


def blocks(text: str) -> list[str]:
    """Return the texts of a page's bash blocks, also indented ones."""
    found = re.findall(r"^( *)```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


class Walk:
    """A shell for the commands of docs/eks.md, where `aws` calls moto; it logs all calls of `aws` and their errors."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        need_kubectl()
        self._log = folder / "log"
        self._log.mkdir()
        program = shutil.which("aws")
        assert program is not None, "aws is missing: make manifests installs it"
        stand_in(folder, "aws", AWS.format(aws=program))
        for name in ("docker", "eksctl", "helm", "kubectl", "curl"):
            path = stand_in(folder, name, OTHER.format(kubectl=shutil.which("kubectl")))["PATH"]
        self._environment = environment | {"PATH": path, "LOG": str(self._log), "AWS_PAGER": ""}

    def run(self, script: str) -> None:
        """Run commands of the page in the shell, after its settings; a failed one does not stop those after it."""
        site = blocks(WALK)[0]
        done = subprocess.run(
            ["bash", "-u", "-c", f"{site}\n{script}"],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "unbound variable" not in done.stderr
        assert "command not found" not in done.stderr

    def read(self, name: str) -> str:
        file = self._log / name
        return file.read_text() if file.exists() else ""

    @property
    def refused(self) -> list[str]:
        """Error messages by which `aws` refused its arguments."""
        return [line for line in self.read("errors").splitlines() if line.startswith(REFUSED)]

    @property
    def failed(self) -> set[tuple[str, ...]]:
        """Each `aws` command that failed, as (service, operation)."""
        lines = (line.split() for line in self.read("aws").splitlines())
        return {tuple(words[1:3]) for words in lines if words[0] != "0"}

    def ask(self, *words: str) -> Any:
        """Run an `aws` command at the stand-in; return its JSON answer, None if it is empty."""
        command = [str(shutil.which("aws")), *words, "--output", "json"]
        done = subprocess.run(command, env=self._environment, capture_output=True, check=True)
        return json.loads(done.stdout or "null")


@pytest.fixture
def walk(tmp_path: Path, cloudwatch: CloudWatch) -> Walk:
    return Walk(tmp_path, cloudwatch.environment)


def site() -> dict[str, str]:
    lines = (KUBERNETES / "components" / "site" / "site.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_the_walk_makes_what_it_removes(walk: Walk) -> None:
    """The last commands of docs/eks.md remove all AWS resources that its earlier commands create.

    Regression: the page had no cleanup, and a reserved trn2.48xlarge went on costing.
    """
    steps, _, removal = WALK.partition("**Remove**")
    walk.run("\n".join(blocks(steps)[1:]))
    assert walk.refused == []
    nothing_yet = {("s3", "cp"), ("s3", "sync")}  # nothing was measured, and nothing compiled elsewhere
    assert walk.failed <= UNKNOWN_TO_MOTO | nothing_yet, walk.read("errors")
    repositories = walk.ask("ecr", "describe-repositories")["repositories"]
    assert {each["repositoryName"] for each in repositories} == {"specdec-cpu", "specdec-neuron"}
    assert [each["Name"] for each in walk.ask("s3api", "list-buckets")["Buckets"]] == [site()["BUCKET"]]
    body = walk.ask("cloudwatch", "get-dashboard", "--dashboard-name", site()["CLUSTER"])["DashboardBody"]
    assert {each["properties"].get("region", site()["REGION"]) for each in json.loads(body)["widgets"]} == {
        site()["REGION"]
    }
    walk.run("\n".join(blocks(removal)))
    assert walk.refused == []
    assert walk.failed <= UNKNOWN_TO_MOTO | nothing_yet, walk.read("errors")
    assert walk.ask("ecr", "describe-repositories")["repositories"] == []
    assert walk.ask("s3api", "list-buckets").get("Buckets", []) == []
    assert walk.ask("cloudwatch", "list-dashboards")["DashboardEntries"] == []


def test_applied_objects_are_deleted_or_end_with_the_cluster() -> None:
    applied, deleted = (set(re.findall(rf"kubectl {verb} -k (\S+)", WALK)) for verb in ("apply", "delete"))
    folders = {name for name in applied if "/compile/" not in name}
    pools = {f"deploy/kubernetes/nodes/{name}" for name in ("on-demand", "drafts")}  # `kubectl delete nodepools --all`
    assert folders - deleted == pools
    assert deleted <= applied


def test_every_pushed_image_is_one_that_pods_name(walk: Walk) -> None:
    walk.run(blocks(WALK)[1])
    pushed = set(re.findall(r"^docker push (\S+)$", walk.read("others"), re.MULTILINE))
    folders = ("overlays/trn2-baseline", "overlays/trn2-fused", "weights", "benchmark", "compile/trn2-fused")
    named = set(re.findall(r"image: (\S*\.amazonaws\.com\S+)", "".join(text_of(KUBERNETES / each) for each in folders)))
    assert pushed == named


def aws_lines(page: Path) -> list[str]:
    """Return the `aws` commands on a page, also within sentences, except those that the test of docs/eks.md runs."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(text.replace(WALK, "")) for line in block.splitlines()]
    spoken = re.findall(r"`(aws [a-z0-9]+ [^`]+ [^`]+)`", text)
    return [*(line for line in lines if line.startswith("aws ")), *(" ".join(words.split()) for words in spoken)]


def test_other_lines_of_the_aws_cli_are_taken(walk: Walk) -> None:
    """AWS's command line accepts the arguments of every `aws` command on the pages.

    Commands with placeholders may fail at moto, which refuses their values.
    """
    pages = [ROOT / "docs" / f"{name}.md" for name in ("deployment", "kubernetes", "eks")]
    pages += (ROOT / "docs" / "tutorials").glob("*.md")
    walk.run("\n".join(line for page in pages for line in aws_lines(page)))
    assert walk.refused == []


def test_a_line_that_the_cli_would_not_send_is_noticed(walk: Walk) -> None:
    for line in (
        "aws ecr create-repositry --repository-name a",
        "aws ecr create-repository --repository a --tags",
        "aws cloudwatch put-dashboard --dashboard-title a --dashboard-body b",
        "aws ec2 run-instances --metadata-options HttpToken=required",
    ):
        num_before = len(walk.refused)
        walk.run(line)
        assert len(walk.refused) > num_before, line


def cluster() -> Manifest:
    (document,) = yaml.safe_load_all(text_of(KUBERNETES / "cluster"))
    return dict(document)


def test_every_namespace_of_ours_has_its_role() -> None:
    """Every namespace whose pods mount a bucket has an IAM role for it in the cluster's manifest.

    Regression: the page only described the role in words, and without the role the first mount hung.
    """
    folders = (*(f"overlays/{name}" for name in COMPILED), "weights", "benchmark")
    documents = {name: manifests(KUBERNETES / name) for name in folders}
    bound = {each["namespace"]: each for each in cluster()["iam"]["podIdentityAssociations"]}
    for each in documents.values():
        (volume,) = of_kind(each, "PersistentVolume")
        bucket = volume["spec"]["csi"]["volumeAttributes"]["bucketName"]
        association = bound.pop(of_kind(each, "Namespace")[0]["metadata"]["name"])
        assert association["serviceAccountName"] == of_kind(each, "ServiceAccount")[0]["metadata"]["name"]
        listed, objects, *further = association["permissionPolicy"]["Statement"]
        assert (listed["Resource"], objects["Resource"]) == (f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*")
        assert not any("Delete" in action or "*" in action for action in (*listed["Action"], *objects["Action"]))
        publishes = any("--namespace" in str(one.get("data")) for one in of_kind(each, "ConfigMap"))
        assert [one["Action"] for one in further] == ([["cloudwatch:PutMetricData"]] if publishes else [])
    assert list(bound) == ["kube-system"]


def test_the_cluster_is_that_of_the_site() -> None:
    document, yours = cluster(), site()
    account = yours["REGISTRY"].partition(".")[0]
    assert (document["metadata"]["name"], document["metadata"]["region"]) == (yours["CLUSTER"], yours["REGION"])
    text = text_of(KUBERNETES / "cluster")
    assert set(re.findall(r"arn:aws:iam::(\d+):", text)) == {account}
    assert f"arn:aws:iam::{account}:role/{yours['NODE_ROLE']}" in text
    assert re.findall(r"\b(?:CLUSTER|REGION|ACCOUNT|BUCKET)\b", text) == []
    versions = of_kind(manifests(KUBERNETES / "overlays" / "trn2-fused"), "ResourceClaimTemplate")
    assert versions[0]["apiVersion"] == "resource.k8s.io/v1"
    assert tuple(map(int, document["metadata"]["version"].split("."))) >= (1, 34)


def test_the_dashboard_shows_what_is_published() -> None:
    metrics = import_module("deploy.cloudwatch.publish").METRICS
    widgets = json.loads((ROOT / "deploy" / "cloudwatch" / "dashboard.json").read_text())["widgets"]
    expressions = [each["properties"]["metrics"][0][0]["expression"] for each in widgets if each["type"] == "metric"]
    ours = [each for each in expressions if "{Qwen/LLMPerf,Variant,TestCase}" in each]
    assert {name for each in ours for name in re.findall(r'MetricName="(\w+)"', each)} == set(metrics)
    assert len(expressions) - len(ours) == 1  # of the devices
    for left in widgets:
        for right in widgets:
            assert left is right or not _overlap(left, right)


def _overlap(left: dict[str, Any], right: dict[str, Any]) -> bool:
    across = left["x"] < right["x"] + right["width"] and right["x"] < left["x"] + left["width"]
    return bool(across and left["y"] < right["y"] + right["height"] and right["y"] < left["y"] + left["height"])


def test_nodes_on_demand_are_for_claims() -> None:
    """One node pool starts on-demand instances and another reserved ones, each at most one node with Neuron devices.

    Regression: the only node pool took reserved instances, and on-demand ones needed an edit.
    """
    pools = {name: of_kind(manifests(KUBERNETES / "nodes" / name), "NodePool")[0] for name in ("on-demand", "reserved")}
    kinds = {name: each["spec"]["template"]["spec"]["requirements"][0]["values"] for name, each in pools.items()}
    assert kinds == {"on-demand": ["on-demand"], "reserved": ["reserved"]}
    assert {(each["spec"]["replicas"], each["spec"]["limits"]["nodes"]) for each in pools.values()} == {(1, "1")}
