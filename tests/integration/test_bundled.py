"""Tests of the models in this repository, run by commands without flags for models or prompts, as in the README."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import minimal
from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.workers.completion import CompletionRequest
from tests.support.servers import DRAFTS, complete_all, draft_server, fused_server, run_command, target_server

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

MAX_NEW_TOKENS = 32
REPOSITORY_LIMIT_BYTES = 40_000_000


@pytest.fixture(scope="module", autouse=True)
def packed() -> None:
    for model in (BUNDLED_TARGET, BUNDLED_DRAFT):
        packed_decoder(model, "float32", None)


def bundled_prompts() -> list[str]:
    return BUNDLED_PROMPTS.read_text().splitlines()


def transformers_tokens(prompts: list[str]) -> list[list[int]]:
    """Return, for each prompt, the token ids that the bundled target gives greedily in Transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    outputs = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        outputs.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncGenerator[ServerProcess, None]:
    port = free_port()
    async with server_process("target", "target", "--port", str(port), "--threads", "1", *DRAFTS, port=port) as server:
        yield server


async def test_target_and_draft_commands_give_transformers_tokens(target: ServerProcess) -> None:
    """A target and a draft command give Transformers' greedy tokens; over half of the draft tokens are accepted."""
    flags = ("--port", str(target.port), "--format", "json", "--max_new_tokens", str(MAX_NEW_TOKENS))
    result = await run_command("--role", "draft", *flags)
    assert result.code == 0, result.stderr
    assert [o["prompt"] for o in result.objects] == bundled_prompts()
    assert [o["token_ids"] for o in result.objects] == transformers_tokens(bundled_prompts())
    rates = [o["acceptance_rate"] for o in result.objects]
    assert sum(rates) / len(rates) > 0.5


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.release)])
async def test_every_topology_gives_the_targets_tokens(dtype: str) -> None:
    """A server with only the draft, and one with both models, give the tokens of the target without a draft.

    Both get draft tokens accepted.
    """
    for model in (BUNDLED_TARGET, BUNDLED_DRAFT):
        packed_decoder(model, dtype, None)
    requests = [
        CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=24)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95))
        for seed, prompt in enumerate(bundled_prompts())
    ]
    flags = ("--dtype", dtype)
    async with (
        target_server(BUNDLED_TARGET, *flags) as target,
        draft_server(BUNDLED_DRAFT, target, "--schedule", "sync", *flags) as draft,
        fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, "--adaptive_gamma", "--gamma", "16", *flags) as fused,
    ):
        alone = await complete_all(target, [replace(request, gamma=0) for request in requests])
        for server in (draft, fused):
            helped = await complete_all(server, requests)
            assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
            assert sum(h.num_accepted_tokens for h in helped) > 0


async def test_the_minimal_example_gives_a_servers_tokens(target: ServerProcess) -> None:
    """examples/minimal.py, which has the algorithm on one page, gives the tokens of a real server."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    asked = [(prompt, temperature) for prompt in ("1, 2, 3, 4,", "Once upon a time") for temperature in (0.0, 0.9)]
    requests = [
        CompletionRequest(prompt, SamplingParams(temperature=temperature), seed=7, max_new_tokens=MAX_NEW_TOKENS)
        for prompt, temperature in asked
    ]
    for (prompt, temperature), answer in zip(asked, await complete_all(target, requests), strict=True):
        draft, model = (minimal.Model(path, temperature, 7) for path in (BUNDLED_DRAFT, BUNDLED_TARGET))
        token_ids, end = tokenizer(prompt)["input_ids"], tokenizer.eos_token_id
        own = minimal.generate(draft, model, token_ids, num_tokens=MAX_NEW_TOKENS, gamma=3, end=end)
        assert own == answer.token_ids


async def test_the_wire_examples_give_equal_texts(target: ServerProcess) -> None:
    """The examples of a client and of a draft worker, which use only grpcio and the .proto, print equal texts.

    The worker drafts for its own request, and the target accepts some of its tokens, but not all.
    """
    prompt = "one two three one two three one two"
    client, worker = [
        await run_command(target.address, prompt, program=f"examples/{name}.py") for name in ("client", "draft_worker")
    ]
    assert client.stdout == worker.stdout
    assert len(client.stdout) > 30
    num_accepted, num_tokens = map(int, re.findall(r"\d+", worker.stderr.splitlines()[-1]))
    assert 0 < num_accepted < num_tokens == MAX_NEW_TOKENS


async def test_the_pair_is_as_small_as_promised() -> None:
    def num_bytes(directory: Path) -> int:
        return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())

    assert num_bytes(BUNDLED_TARGET) + num_bytes(BUNDLED_DRAFT) <= REPOSITORY_LIMIT_BYTES
    target, draft = (CheckpointFiles(path).num_parameters for path in (BUNDLED_TARGET, BUNDLED_DRAFT))
    assert target >= 10_000_000
    assert draft * 12 <= target
