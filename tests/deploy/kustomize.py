"""Functions that build Kubernetes manifests by `kubectl kustomize`, and the folders of deploy/kubernetes to build."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.inference.config import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "trn2-baseline", "trn2-fused", "trn2-distributed", "gpu", "gpu-vllm", "vllm-serve")
COMPILED = ("trn2-baseline", "trn2-fused", "trn2-distributed")
KUSTOMIZATIONS = (
    *(f"overlays/{name}" for name in OVERLAYS),
    *(f"compile/{name}" for name in COMPILED),
    *("nodes/on-demand", "nodes/reserved", "nodes/dynamic", "nodes/drafts"),
    *("weights", "benchmark", "policy-check", "monitoring"),
)

Manifest = dict[str, Any]


@cache
def _why_not() -> str | None:
    """Return why this machine's kubectl cannot build deploy/kubernetes; None if it can."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return "there is no kubectl"
    shown = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, check=False).stdout
    version = re.search(r'(?:Client Version: v|GitVersion:"v)(\d+)\.(\d+)', shown)
    if version is None or (int(version[1]), int(version[2])) < (1, 21):
        return f"kubectl is older than 1.21, whose kustomize knows no components: {shown.strip()}"
    return None


def need_kubectl() -> None:
    """Skip the test where kubectl is missing or too old for kustomize's components; the skip names the reason."""
    if (why := _why_not()) is not None:
        pytest.skip(why)


@cache
def text_of(folder: Path) -> str:
    """Return the YAML that kustomize builds from a folder."""
    need_kubectl()
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


def complaints(*command: str | Path) -> str:
    """Run a program that checks files; return what it prints about them, or "" if it finds no error."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr or f"exit code {done.returncode}"


def manifests(folder: Path) -> list[Manifest]:
    """Return the manifests that kustomize builds from a folder; the caller may change them."""
    return [each for each in yaml.load_all(text_of(folder), yaml.CSafeLoader) if each]


def of_kind(documents: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in documents if each["kind"] in kinds]


def with_components(folder: Path, resource: str, *components: str) -> list[Manifest]:
    """Build a resource of deploy/kubernetes with further components; return the manifests.

    The kustomization.yaml for it is written into `folder`.
    """
    up = Path(*[".."] * len(folder.resolve().relative_to("/").parts))
    root = up / KUBERNETES.relative_to("/")
    lines = ["resources:", f"  - {root / resource}", "components:", *(f"  - {root / each}" for each in components)]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return manifests(folder)
