"""overlays/cpu-demo, its own command lines as processes of this machine: addresses and paths are all that differs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inference.config import ROOT
from inference.serving.processes import free_port, server_process
from tests.deploy.consistency import arguments_of
from tests.deploy.kustomize import KUBERNETES, manifests, of_kind
from tests.deploy.test_scripts import KUBECTL, stand_in

pytestmark = pytest.mark.deploy


def flags_of(name: str, replaced: Mapping[str, str]) -> list[str]:
    """Of a workload: role, then flags; with another value where one is given, and paths of Secrets in `replaced`."""
    documents = manifests(KUBERNETES / "overlays" / "cpu-demo")
    workloads = {each["metadata"]["name"]: each for each in of_kind(documents, "StatefulSet", "Deployment")}
    flags = {flag: replaced.get(flag, value) for flag, value in arguments_of(workloads[name], documents).items()}
    flags = {flag: value.replace("/access", replaced["/access"]) for flag, value in flags.items()}
    role = flags.pop("--role")
    return [role, *(f"{flag}={value}" if value else flag for flag, value in flags.items())]


@pytest.fixture
def access(tmp_path: Path) -> str:
    """The Secret, as access.sh makes it."""
    (kept := tmp_path / "kept").mkdir()
    environment = stand_in(tmp_path, "kubectl", KUBECTL) | {"KEPT": str(kept)}
    subprocess.run([KUBERNETES / "access.sh", "cpu-demo"], check=True, env=environment, stdin=subprocess.DEVNULL)
    return str(kept)


@asynccontextmanager
async def deployed(access: str) -> AsyncGenerator[int]:
    """One of each; yields the gateway's port."""
    grpc, http, probe, front, front_probe = (free_port() for _ in range(5))
    here = {"/access": access, "--drain_delay_s": "0"}
    target = flags_of("target", {**here, "--port": str(grpc), "--http_port": str(http), "--probe_port": str(probe)})
    draft = flags_of("draft", {**here, "--attach": f"127.0.0.1:{grpc}"})
    gateway = flags_of(
        "gateway",
        {
            **here,
            "--target_host": "127.0.0.1",
            "--port": str(grpc),
            "--http_port": str(front),
            "--probe_port": str(front_probe),
        },
    )
    async with (
        server_process("target", *target, "--no-lookup", port=grpc, ready_line="serving on"),
        server_process("draft", *draft, port=grpc, ready_line="attached as"),
        server_process("gateway", *gateway, port=front, ready_line=f":{front}"),
    ):
        for port in (probe, front_probe):
            assert (await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/readyz")).status == 200
        yield front


def ask(port: int, prompt: str) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": 48, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


async def test_it_answers_with_the_help_of_its_draft(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool draft is let in by its token; without one, a target on a network gives nobody prompts."""
    monkeypatch.chdir(ROOT)
    async with deployed(access) as port:
        answer = await asyncio.to_thread(ask, port, "1, 2, 3, 4,")
    assert answer["choices"][0]["text"].startswith(" 5, 6, 7")
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
