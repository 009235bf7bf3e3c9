"""The OpenAPI schema and the server agree; the program schemathesis checks this with generated request bodies."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.gateway.app import HttpFront
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from tests.support.completers import ScriptedCompleter, gateway

UNTOLD = (
    "exclude each other",  # at most one field of `structured.NAMES`
    "needs exactly one of",  # structured_outputs
    "prompt or messages must be given",
    "stream_options needs",
    "top_logprobs needs",
    "max_tokens 0 needs",
    "tool_choice required needs",
    "is none of the tools",
    "content is needed",  # in a message that is not the assistant's
    "only JSON can be asked for",  # beside tools
    " twice",  # names of tools
    "knows no effort",  # the model's template, which has the word
    '"param":"request"',  # the body within a body of /v1/audit
    "a block of type",  # of /v1/messages: which fields each needs
)
"""Parts of errors about rules between several fields of a body, which the OpenAPI schema cannot express."""


@pytest.mark.long
async def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    """Bodies that the schema allows are accepted, others are refused, and the schema describes every answer.

    Bodies that break one of the rules in `UNTOLD` may be refused here.
    """
    port = free_port()
    arguments = ("--phases", "fuzzing", "--max-examples", "20", "--seed", "1", "--no-color")
    served = gateway(ScriptedCompleter([["Once", " upon"], ["!"]]), port=port)
    async with opened(HttpFront(served, ServerConfig(grace_s=1.0))):
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"http://127.0.0.1:{port}/openapi.json",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            cwd=tmp_path,
        )
        output, _ = await process.communicate()
    text = output.decode()
    num_untold = sum(map(text.count, UNTOLD))
    assert process.returncode == 0 or 0 < num_untold == text.count("Test Case ID"), text
