"""Tests of audits at real servers, over HTTP and the command line.

An audit checks that a text follows from a model, a request and its seed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port, server_process

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.8, "seed": 7}


@dataclass(frozen=True, slots=True)
class Served:
    """A client of the server that makes texts (with a draft), and the port of the target that audits them."""

    http: httpx.AsyncClient
    port: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served, None]:
    port, http_port, other = free_port(), free_port(), free_port()
    flags = ("--port", str(port), "--http_port", str(http_port))
    async with (
        server_process("fused", "fused_target", *flags, port=port),
        server_process("target", "target", "--port", str(other), port=other),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=120) as http,
    ):
        yield Served(http, other)


async def posted(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await served.http.post(path, json=body)
    return {"status": answer.status_code, **answer.json()}


async def audit_of(served: Served, *flags: str) -> tuple[int, str]:
    """Run the audit command at the target, which did not make the text; return its exit code and its output."""
    command = ("main.py", "--role", "audit", "--port", str(served.port), "--temperature", "0.8", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


async def test_a_text_is_its_models_choice_at_its_seed_alone(served: Served, tmp_path: Path) -> None:
    """An audit finds that a sampled text is what the model chooses at the text's seed, and not at another seed.

    Given as text or as token ids, over HTTP and by the command, the result is the same.
    """
    text = (await posted(served, "/v1/completions", ASKED))["choices"][0]["text"]
    audit = await posted(served, "/v1/audit", {"request": ASKED, "output": text})
    assert (audit["holds"], audit["num_choices"], audit["first_other"]) == (True, 40, None)
    assert audit["verdict"] == "all 40 tokens are this model's choice at seed 7"
    token_ids = [each["token_id"] for each in audit["tokens"]]
    assert (await posted(served, "/v1/audit", {"request": ASKED, "output": token_ids}))["holds"]
    other = await posted(served, "/v1/audit", {"request": {**ASKED, "seed": 8}, "output": text})
    assert not other["holds"]
    assert other["tokens"][other["first_other"]]["margin"] > 0.001
    (tmp_path / "text").write_text(text)
    flags = ("--prompt", ASKED["prompt"], "--output_text", str(tmp_path / "text"))
    assert await audit_of(served, *flags, "--seed", "7") == (0, audit["verdict"] + "\n")
    code, printed = await audit_of(served, *flags, "--seed", "9", "--format", "json")
    assert (code, json.loads(printed)["holds"]) == (1, False)


async def test_a_conversation_and_each_of_its_choices_are_audited(served: Served) -> None:
    asked = {"prompt": "A house", "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
    answer = await posted(served, "/v1/completions", asked)
    for index, choice in enumerate(answer["choices"]):
        audit = await posted(served, "/v1/audit", {"request": asked, "output": choice["text"], "index": index})
        assert audit["holds"], audit
        assert audit["verdict"].endswith(f"at seed {3 + index}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"request": {**ASKED, "seed": None}, "output": "x"}, "audited with its seed"),
        ({"request": {**ASKED, "temperature": -1}, "output": "x"}, "request.temperature"),
        ({"request": ASKED, "output": ""}, "output"),
        ({"request": ASKED, "output": [4_000_000_000]}, "output"),
        ({"request": ASKED, "output": [100_000]}, "100000"),
        ({"request": ASKED, "output": "x", "index": 1}, "index 1 is not below 1"),
        ({"request": {**ASKED, "prompt": "x " * 1500}, "output": [5] * 1900}, "context"),
        ({"output": "x"}, "request"),
    ],
)
async def test_what_cannot_be_audited_is_refused_by_name(served: Served, body: dict[str, Any], words: str) -> None:
    answer = await posted(served, "/v1/audit", body)
    assert answer["status"] == 400
    assert words in answer["error"]["message"]


async def test_the_command_names_what_it_lacks(served: Served) -> None:
    for flags, words in (((), "--output_text"), (("--output_ids", "5,x"), "must be"), (("--output_ids", ""), "valid")):
        code, printed = await audit_of(served, "--prompt", "x", "--seed", "1", *flags)
        assert code == 2
        assert words in printed or "is not valid" in printed
