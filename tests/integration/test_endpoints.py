"""compare_architectures.py --endpoint as users run it: what runs already, over TLS and with a token, and a stranger."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port, server_process
from tests.conftest import ModelDirectories
from tests.support.foreign import foreign_server
from tests.support.servers import run_command

TOKEN = "a-token-of-this-test"
AUTH = f'[[token]]\nname = "bench"\nsha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\nroles = ["client"]\n'
CHAT = {"messages": [{"role": "user", "content": "1 2 3"}, {"role": "user", "content": "and"}]}


@pytest.mark.long
async def test_endpoints_are_compared_where_they_run(models: ModelDirectories, tmp_path: Path) -> None:
    """A server of ours by its two doors and a foreign one get the same prompts; comparable pairs are compared."""
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
    """Return the exit code, the last line of stdout, and stderr."""
    result = await run_command(*flags, program="compare_architectures.py", timeout_s=600)
    lines = result.stdout.splitlines()
    return result.code, json.loads(lines[-1]) if lines else {}, result.stderr


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_a_near_tie_of_bfloat16_differs_from_another_model(tmp_path: Path) -> None:
    """The story: Job measure failed at any near-tie of two bfloat16 servers, so a success looked like a fault."""
    exact, rounded, other, door = (free_port() for _ in range(4))
    flags = ["--threads", "1", "--backend", "torch", "--model"]
    in_bfloat16 = ["--dtype", "bfloat16", "--http_port", str(door)]
    async with (
        server_process("a", "target", *flags, str(BUNDLED_TARGET), "--port", str(exact), port=exact),
        server_process("b", "target", *flags, str(BUNDLED_TARGET), *in_bfloat16, "--port", str(rounded), port=rounded),
        server_process("c", "target", *flags, str(BUNDLED_DRAFT), "--port", str(other), port=other),
    ):
        report = ["--output", str(tmp_path / "report"), "--equal_weights", "--num_runs", "1", "--ignore_eos"]
        pair = ["--endpoint", f"a=grpc://127.0.0.1:{exact}", "--endpoint", f"b=http://127.0.0.1:{door}/v1"]
        code, results, errors = await _compare([*pair, *report, "--near_tie", "0.25"])
        assert (code, results["same_tokens"], results["differences"]) == (0, True, []), errors
        assert len(results["near_ties"]) > 0
        assert "apart in log-probability" in results["near_ties"][0]
        assert "near-tie: " in errors
        pair[-1] = f"c=grpc://127.0.0.1:{other}"
        code, results, _ = await _compare([*pair, *report, "--near_tie", "0.25"])
        assert (code, results["same_tokens"]) == (1, False)
