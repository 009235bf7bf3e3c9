"""Test of compare_architectures.py --endpoint, which measures running servers: of this project, and of another one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.serving.processes import free_port, server_process
from tests.conftest import ModelDirectories
from tests.support.foreign import foreign_server
from tests.support.servers import run_command

TOKEN = "a-token-of-this-test"
AUTH = f'[[token]]\nname = "bench"\nsha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\nroles = ["client"]\n'
CHAT = {"messages": [{"role": "user", "content": "1 2 3"}, {"role": "user", "content": "and"}]}


@pytest.mark.long
async def test_endpoints_are_compared_where_they_run(models: ModelDirectories, tmp_path: Path) -> None:
    """Three endpoints get equal prompts: a server of this project by gRPC and by HTTP, and one of another project.

    The answers of endpoints with the same model are compared with each other.
    """
    port, http_port = free_port(), free_port()
    (tmp_path / "auth.toml").write_text(AUTH)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "texts.txt").write_text("1 2 3 and\nin the wing\n")
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
    security = ["--tls_self_signed", str(tmp_path / "certs"), "--auth_file", str(tmp_path / "auth.toml")]
    serving = ["--model", str(models.target), "--port", str(port), "--http_port", str(http_port), *security]
    async with (
        server_process("target", "target", *serving, port=port, ready_line="serving on"),
        foreign_server() as foreign,
    ):
        flags = [
            *("--endpoint", f"a=grpc://127.0.0.1:{port}", "--endpoint", f"b=https://127.0.0.1:{http_port}/v1"),
            *("--endpoint", f"c={foreign.url}", "--tls_ca", str(tmp_path / "certs" / "ca.pem")),
            *("--token_file", str(tmp_path / "token"), "--temperature", "0.8", "--seed", "7", "--ignore_eos"),
            *("--dataset", str(tmp_path / "texts.txt"), "--dataset", str(tmp_path / "chats.jsonl")),
            *("--max_new_tokens", "8", "--num_runs", "1", "--concurrency", "2", "--output", str(tmp_path / "report")),
        ]
        code, results, errors = await _compare(flags)
        assert code == 0, errors
        assert (results["same_tokens"], results["not_comparable"]) == (True, ["c"])
        assert "c does not count tokens: one is assumed in each of its messages" in results["warnings"]
        cells = {(cell["endpoint"], cell["kind"]): cell for cell in results["statistics"]}
        assert set(cells) == {(name, kind) for name in "abc" for kind in ("texts", "chats")}
        for kind in ("texts", "chats"):
            assert cells["a", kind]["number_output_tokens"]["min"] == 8
            assert cells["b", kind]["number_output_tokens"]["min"] == 8
            assert cells["a", kind]["number_input_tokens"] == cells["b", kind]["number_input_tokens"]
        code, _, errors = await _compare(
            ["--config", str(tmp_path / "report" / "config.toml"), "--max_new_tokens", "200"]
        )
        assert code == 2
        assert "texts prompt 1 and what is answered may have" in errors
        assert "the context of a has 128" in errors


async def _compare(flags: list[str]) -> tuple[int, dict[str, Any], str]:
    """Run a comparison; return its exit code, the JSON in the last line of its output (or {}), and its errors."""
    result = await run_command(*flags, program="compare_architectures.py", timeout_s=600)
    lines = result.stdout.splitlines()
    return result.code, json.loads(lines[-1]) if lines else {}, result.stderr
