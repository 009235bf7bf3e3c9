"""Tests of servers with backend neuron, each a process; the sources of NxDI (AWS's NxD Inference) run on the CPU.

The tokens that they must give are those of the target alone on the torch backend, in this process.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.cli.app import main
from specdec.inference.config import ModelConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.request import SamplingParams, Schedule
from specdec.inference.serving.assembly import target_engine
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support import servers
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.nxdi import PYTHON_PATH
from tests.support.prompts import PROMPTS
from tests.support.servers import complete, complete_all, completed_by, draft_server, fused_server, target_server

pytestmark = pytest.mark.usefixtures("on_real")

GAMMA = 3
NUM_TOKENS = 12
NEURON = ("--backend", "neuron", "--dtype", "float32", "--sequence_length", "80", "--batch", "2")
TARGET = (*NEURON, "--gamma", str(GAMMA))
PAIR = (*NEURON, "--gamma", "4")
EAGLE = (*PAIR, "--speculation_method", "eagle")
DRAFT = (*NEURON, "--gamma", str(GAMMA), "--sequence_length", "32")
"""Flags of a draft model on backend neuron; its context, 32 tokens, is shorter than the target's."""

Servers = dict[str, ServerProcess]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set the environment variables of all processes that this module starts; yield the folder for compiled models."""
    folder = tmp_path_factory.mktemp("neuron")
    artifacts = folder / "artifacts"
    variables = {
        "PYTHONPATH": PYTHON_PATH,
        "NEURON_COMPILED_ARTIFACTS": str(artifacts),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
            patch.setitem(servers.ENVIRONMENT, name, value)
        yield artifacts


@pytest.fixture(scope="module")
def eagle(models: ModelDirectories, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a draft model for EAGLE; return its directory.

    Compile it with its target, and the draft server's model, so that servers only load them.
    """
    draft = save_eagle_draft(tmp_path_factory.mktemp("eagle") / "draft", "eagle")
    pair = ("--target_model", str(models.target), "--draft_model", str(draft))
    assert main(["--role", "compile", *pair, *EAGLE]) == 0
    assert main(["--role", "compile", "--draft_model", str(models.related), *NEURON, *DRAFT[-2:]]) == 0
    return draft


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(models: ModelDirectories, eagle: Path) -> AsyncGenerator[Servers, None]:
    """Start servers with backend neuron, and yield them by name.

    They are a target, a draft server for it, and two servers with both models: "fused", and "eagle", whose draft is an
    EAGLE model and which samples on the device.
    """
    async with AsyncExitStack() as stack:
        cores = ("--neuron_cores", "4-5", "--tp_degree", "2")
        pairs = {
            "fused": fused_server(models.target, models.related, *PAIR, "--http_port", str(free_port())),
            "eagle": fused_server(models.target, eagle, *EAGLE, "--http_port", str(free_port())),
        }
        starting = {name: asyncio.create_task(stack.enter_async_context(pair)) for name, pair in pairs.items()}
        target = await stack.enter_async_context(target_server(models.target, *TARGET, *cores))
        draft = await stack.enter_async_context(draft_server(models.related, target, *DRAFT))
        yield {"target": target, "draft": draft, **{name: await server for name, server in starting.items()}}


async def reference(models: ModelDirectories, requests: Sequence[CompletionRequest]) -> list[list[int]]:
    """Return the token ids that the target gives to these requests on backend torch, without a draft."""
    config = ModelConfig(models.target, backend="torch", sequence_length=76, num_slots=2, num_threads=1)
    async with target_engine(config, EngineLimits(64)) as running:
        completer = LocalCompleter(running.engine, running.tokenizer)
        return [completion.token_ids for completion in await completed_by(completer, requests)]


def requests(*, sampled: bool) -> list[CompletionRequest]:
    """Return requests, greedy or sampled, for which the target waits for each proposal of its draft.

    A draft that runs ahead, and is as slow as its target, might be late with all of its tokens.
    """
    sampling = SamplingParams(temperature=1.1, top_k=40, top_p=0.9) if sampled else SamplingParams()
    template = CompletionRequest("", sampling, max_new_tokens=NUM_TOKENS, schedule=Schedule.SYNC)
    return [
        replace(template, prompt=prompt, seed=number if sampled else None) for number, prompt in enumerate(PROMPTS[:6])
    ]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
async def test_every_topology_gives_the_torch_target_s_tokens(
    models: ModelDirectories, started: Servers, sampled: bool
) -> None:
    wanted = requests(sampled=sampled)
    expected = await reference(models, wanted)
    for name in ("target", "draft", "fused", *(() if sampled else ("eagle",))):
        completions = await complete_all(started[name], wanted, concurrency=4)
        assert [completion.token_ids for completion in completions] == expected, name
        if name in ("draft", "fused"):
            assert sum(completion.num_accepted_tokens for completion in completions) > 0
    ahead = [replace(request, schedule=Schedule.ASYNC) for request in wanted]
    assert [completion.token_ids for completion in await complete_all(started["draft"], ahead)] == expected


def test_logs_are_not_drowned_in_nxdi_s(started: Servers) -> None:
    """Most lines in a server's log are this project's; NxDI's own messages are only a few.

    Regression: only 8 of 250 lines in a draft server's log were its own, since NxDI writes hundreds per model to the
    root logger.
    """
    for server in started.values():
        lines = server.log.read_text().splitlines()
        foreign = [line for line in lines if " root: " in line or " Neuron: " in line]
        assert len(lines) < 60, foreign[:20]
        assert not [line for line in foreign if "Unexpected keyword arguments" in line]


@pytest.mark.parametrize("name", ["fused", "eagle"])
async def test_requests_of_the_tutorials_are_served(started: Servers, name: str) -> None:
    """A server answers each request of the tutorials in docs/, whatever its temperature.

    Regression: servers refused temperatures 0.7 (curl), 1.0 (LLMPerf's '{}') and 0.9 (the tutorials' client).
    """
    body = {"prompt": "the wind", "max_tokens": 4}
    async with httpx.AsyncClient(base_url=_http(started[name])) as client:
        for fields in ({}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.0}):
            response = await client.post("/v1/completions", json={**body, **fields})
            assert (response.status_code, response.json()["usage"]["completion_tokens"] > 0) == (200, True), fields
    request = CompletionRequest("the wind", SamplingParams(temperature=0.9), max_new_tokens=4)
    assert len((await complete(started[name], request)).token_ids) > 0


async def test_a_device_sampler_refuses_a_seed(started: Servers) -> None:
    """A server that samples on the device refuses a sampled request with a seed; the error names the field `seed`.

    This holds over gRPC and HTTP. Requests without a seed, and greedy ones with one, are answered.
    """
    sampling = pb.SamplingParams(temperature=0.8, top_k=20, seed=7)
    async with open_channel(started["eagle"].address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="seed: this server samples on the device") as caught:
            await stub.Generate(pb.GenerateRequest(text="the wind", sampling=sampling), timeout=60).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        sampling.ClearField("seed")
        message = await stub.Generate(pb.GenerateRequest(text="the wind", sampling=sampling), timeout=60).read()
        assert message.WhichOneof("event") == "started"
        greedy = pb.GenerateRequest(text="the wind", sampling=pb.SamplingParams(seed=7), max_new_tokens=2)
        assert (await stub.Generate(greedy, timeout=60).read()).WhichOneof("event") == "started"
    async with httpx.AsyncClient(base_url=_http(started["eagle"])) as client:
        body = {"prompt": "the wind", "temperature": 0.8, "top_k": 20, "max_tokens": 3}
        for field, value in (("seed", 7), ("top_k", 257), ("min_p", 0.2), ("repetition_penalty", 1.2), ("logprobs", 2)):
            response = await client.post("/v1/completions", json={**body, field: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert (await client.post("/v1/completions", json=body)).status_code == 200


def _http(server: ServerProcess) -> str:
    match = re.search(r"HTTP on (http://[\d.:]+)", server.log.read_text())
    assert match is not None
    return match[1]


async def test_a_draft_may_have_a_shorter_context(models: ModelDirectories, started: Servers) -> None:
    """Past the end of the draft's context, the target goes on without a draft, with the tokens that it has alone."""
    prompts: tuple[str | tuple[int, ...], ...] = (PROMPTS[0], tuple(range(20, 70)))
    for schedule in Schedule:
        wanted = [
            CompletionRequest(prompt, max_new_tokens=number, ignore_eos=True, schedule=schedule)
            for prompt, number in zip(prompts, (50, 12), strict=True)
        ]
        completions = await complete_all(started["draft"], wanted)
        assert [completion.token_ids for completion in completions] == await reference(models, wanted)
        if schedule is Schedule.SYNC:  # in run-ahead a target as small as its draft may well be first
            assert completions[0].num_draft_tokens > 0
        assert completions[1].num_draft_tokens == 0


def num_compiled(store: Path) -> int:
    return len(list(store.glob("*/*/specdec.json")))


async def compare(*flags: str) -> str:
    """Run compare_architectures.py and return its output."""
    result = await servers.run_command(*flags, program="compare_architectures.py", timeout_s=180.0)
    assert result.code == 0, result.stderr
    return result.stdout


@pytest.mark.long
async def test_a_comparison_on_neuron_finds_equal_tokens(
    models: ModelDirectories, environment: Path, started: Servers, tmp_path: Path
) -> None:
    """A comparison on backend neuron runs, and all topologies in it give the same sampled tokens.

    Its servers load only models that an earlier run with `--compile only` has compiled.
    """
    assert started
    (tmp_path / "kind.txt").write_text("1 2 3 and\n")
    flags = [
        *("--target-model", str(models.target), "--draft-models", str(models.related), "--backend", "neuron"),
        *("--draft_backend", "torch", "--topologies", "target,fused,distributed"),
        *("--dtype", "float32", "--sequence_length", "80", "--gamma", str(GAMMA), "--rtt-ms", "0", "--num-runs", "1"),
        *("--temperature", "0.8"),
        *("--prompt-file", str(tmp_path / "kind.txt"), "--max-new-tokens", "8", "--output", str(tmp_path / "report")),
    ]
    compiled = num_compiled(environment)
    assert await compare(*flags, "--compile", "only") == ""
    assert num_compiled(environment) > compiled
    stdout = await compare(*flags, "--compile", "never")
    results = json.loads(stdout.splitlines()[-1])
    assert results["same_tokens"] is True
    assert {cell["topology"] for cell in results["cells"]} == {"target", "fused", "distributed"}
