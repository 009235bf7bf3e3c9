"""Tests of models named by hub ids instead of directories; a stand-in for the Hugging Face Hub serves them by HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from specdec.inference.serving.processes import free_port
from tests.conftest import ModelDirectories
from tests.support.hub import COMMIT, TOKEN, FakeHub, running_hub
from tests.support.servers import CommandResult, command, run_command, until_healthy

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FLAGS = ("--prompt", "the wind", "--max_new_tokens", "4", "--threads", "1", "--format", "json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(models: ModelDirectories) -> AsyncGenerator[FakeHub, None]:
    repositories = {"seed/target": models.target, "seed/draft": models.related, "seed/closed": models.target}
    async with running_hub(FakeHub(repositories, gated=frozenset({"seed/closed"}))) as hub:
        yield hub


async def run(hub: FakeHub, cache: Path, *arguments: str, **variables: str) -> CommandResult:
    """Run main.py with this hub, the cache directory `cache`, and further environment variables; return its result."""
    return await run_command(*arguments, variables={"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), **variables})


@pytest.mark.long
async def test_an_id_is_downloaded_once(hub: FakeHub, models: ModelDirectories, tmp_path: Path) -> None:
    directory = await run(hub, tmp_path, "--role", "verify_target", "--model", str(models.target), *FLAGS)
    first = await run(hub, tmp_path, "--role", "verify_target", "--model", "seed/target", *FLAGS)
    assert first.code == 0, first.stderr
    assert [each["token_ids"] for each in first.objects] == [each["token_ids"] for each in directory.objects]
    assert "model.safetensors" in {path.rpartition("/")[2] for _, path in hub.requests}
    assert "%" in first.stderr, "a progress bar"
    hub.requests.clear()
    again = await run(hub, tmp_path, "--role", "verify_target", "--model", "seed/target", "--revision", COMMIT, *FLAGS)
    assert (again.code, hub.requests) == (0, []), "a commit that is in the cache needs no hub"


@pytest.mark.release
async def test_offline_mode_takes_what_the_cache_has(hub: FakeHub, tmp_path: Path) -> None:
    command = ("--role", "verify_draft", "--model", "seed/draft", *FLAGS)
    without = await run(hub, tmp_path, *command, HF_HUB_OFFLINE="1")
    assert (without.code, without.stdout) == (2, "")
    assert "seed/draft: there is no such directory here, no such model in the cache" in without.last_line
    assert "HF_HUB_OFFLINE is set" in without.last_line
    assert (await run(hub, tmp_path, *command)).code == 0
    hub.requests.clear()
    assert (await run(hub, tmp_path, *command, HF_HUB_OFFLINE="1")).code == 0
    assert not hub.requests


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--model", "seed/none"), ("seed/none", "no such directory here", "no such model at http://127.0.0.1")),
        (("--model", "seed/target", "--revision", "old"), ("seed/target at revision old", "no such revision")),
        (("--model", "seed/closed"), ("seed/closed is gated", "accept its terms at http://127.0.0.1", "HF_TOKEN")),
    ],
)
async def test_an_unavailable_model_is_an_error_of_one_line(
    hub: FakeHub, tmp_path: Path, flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    result = await run(hub, tmp_path, "--role", "verify_target", *flags, *FLAGS)
    assert result.code == 2
    assert "Traceback" not in result.stderr
    assert all(part in result.last_line for part in parts), result.last_line


async def test_a_hub_that_does_not_answer_is_named(hub: FakeHub, tmp_path: Path) -> None:
    flags = ("--role", "verify_target", "--model", "seed/target", *FLAGS)
    result = await run(hub, tmp_path, *flags, HF_ENDPOINT="http://127.0.0.1:9")
    assert (result.code, "http://127.0.0.1:9" in result.last_line) == (2, True), result.last_line


@pytest.mark.release
async def test_a_token_opens_a_gated_model(hub: FakeHub, tmp_path: Path) -> None:
    flags = ("--role", "verify_target", "--model", "seed/closed", *FLAGS)
    assert (await run(hub, tmp_path, *flags, HF_TOKEN=TOKEN)).code == 0


@pytest.mark.release
async def test_a_hub_server_uses_the_targets_id(hub: FakeHub, tmp_path: Path) -> None:
    """A server of draft and target has the target's hub id as its model's name, not the name of a cache directory."""
    port = free_port()
    models = ("--target_model", "seed/target", "--draft_model", "seed/draft", "--revision", "main", "--threads", "1")
    ports = ("--port", str(free_port()), "--http_port", str(port))
    flags = ("--role", "fused_target", *models, *ports)
    async with command(*flags, variables={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}) as process:
        await until_healthy(port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            listed = (await client.get("/v1/models")).json()
            body = {"model": "seed/target", "prompt": "the wind", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).is_success
        process.terminate()
        assert await process.wait() == 0
    assert listed["data"][0]["id"] == "seed/target"
