"""Tests of real gateways (HTTP in front of gRPC) with the official openai package: all topologies give equal texts."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from specdec.inference.config import ROOT
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete, draft_server, fused_server, until_healthy

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "the wind and the sea"
TOPOLOGIES = ("target", "distributed", "fused")

Clients = dict[str, Any]

# Every one changes the tokens of the request without it, which a test checks.
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.3},
    "top_k": {"extra_body": {"top_k": 2}},
    "min_p": {"extra_body": {"min_p": 0.4}},
    "repetition_penalty": {"temperature": 0, "extra_body": {"repetition_penalty": 3.0}},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0, "temperature": 1.5},
    "logit_bias": {"logit_bias": {"5": 12, "9": 11}},
    "min_tokens": {"logit_bias": {"1": 8}, "extra_body": {"min_tokens": 6}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}, "logit_bias": {"1": 8}},
}


def client_of(port: int) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


@asynccontextmanager
async def gateway_process(
    behind: ServerProcess, *flags: str, directory: Path | None = None
) -> AsyncGenerator[int, None]:
    """Run a gateway for the server `behind`; yield its HTTP port once it answers; it must end with exit code 0.

    `directory` is its working directory.
    """
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "main.py"), "--role", "gateway",
        "--port", str(behind.port), "--http_port", str(port), *flags,
        stderr=asyncio.subprocess.DEVNULL, cwd=directory,
    )  # fmt: skip
    try:
        await until_healthy(port)
        yield port
    finally:
        process.terminate()
        assert await process.wait() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(models: ModelDirectories, target: ServerProcess) -> AsyncGenerator[dict[str, int], None]:
    """Start servers of three topologies; yield the HTTP port of each by topology.

    Two are gateways, in front of a target and of a draft server; the third is a server with both models.
    """
    http_port = free_port()
    async with AsyncExitStack() as stack:
        draft = draft_server(models.related, target)
        fused = fused_server(models.chat_target, models.related, "--http_port", str(http_port))
        worker, _ = await asyncio.gather(stack.enter_async_context(draft), stack.enter_async_context(fused))
        gateways = (gateway_process(target), gateway_process(worker))
        fronts = await asyncio.gather(*(stack.enter_async_context(gateway) for gateway in gateways))
        yield dict(zip(TOPOLOGIES, (*fronts, http_port), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(ports: dict[str, int]) -> AsyncGenerator[Clients, None]:
    clients = {name: client_of(port) for name, port in ports.items()}
    yield clients
    for client in clients.values():
        await client.close()


async def texts(client: Any, **fields: Any) -> list[str]:
    answer = await client.completions.create(model="target", prompt=PROMPT, **fields)
    return [choice.text for choice in answer.choices]


async def test_every_topology_gives_the_same_text_and_every_parameter_matters(clients: Clients) -> None:
    by_parameter = {**PARAMETERS, "no penalty": {"temperature": 1.5}}
    answers = []
    for client in clients.values():
        (model,) = (await client.models.list()).data
        assert (model.id, model.max_model_len) == ("target", 128)
        common: dict[str, Any] = {"max_tokens": 20, "seed": 11}
        answers.append([(await texts(client, **{**common, **fields}))[0] for fields in by_parameter.values()])
    assert answers[0] == answers[1] == answers[2]
    assert len({*answers[0]}) == len(by_parameter)


async def test_a_gateway_writes_its_profile(target: ServerProcess, tmp_path: Path) -> None:
    """The file that `--profile` makes has a row for each choice of each answer, and none for refused requests."""
    async with gateway_process(target, "--profile", directory=tmp_path) as port:
        client = client_of(port)
        await texts(client, max_tokens=6, n=2, temperature=0)
        named: Any = {"extra_headers": {"x-request-id": "slow"}}
        stream = await client.completions.create(model="target", prompt=PROMPT, max_tokens=9, stream=True, **named)
        num_chunks = len([chunk async for chunk in stream])
        with pytest.raises(openai.BadRequestError):
            await texts(client, max_tokens=6, logit_bias={"999": 1})
        await client.close()
    (file,) = sorted(tmp_path.glob("performance_gateway_*.json"))  # noqa: ASYNC240 - a test may wait
    document = json.loads(file.read_text())
    assert document["role"] == "gateway"
    assert [row["num_output_tokens"] for row in document["requests"]] == [6, 6, num_chunks]
    assert all(0 < row["ttft_s"] <= row["wall_s"] for row in document["requests"])
    first, second, named_row = (row["request"] for row in document["requests"])
    assert (len(first), second, named_row) == (32, first, "slow"), "a row can be found by the id of its request"
    assert len(file.with_suffix(".csv").read_text().splitlines()) == 1 + 3, "a head and the rows"


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_stream_is_the_answer_token_by_token(clients: Clients, topology: str) -> None:
    """A streamed answer has one chunk per token, and the token counts at the end if the request asked for them."""
    fields: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.8}
    whole = await clients[topology].completions.create(**fields)
    stream = await clients[topology].completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert len(chunks) == last.usage.completion_tokens == whole.usage.completion_tokens


async def test_whole_and_streamed_chats_are_equal(clients: Clients, target: ServerProcess) -> None:
    """Streamed and whole chats are equal to the target's answer to the chat template's text."""
    messages: Any = [{"role": "system", "content": ""}, {"role": "user", "content": "sing"}]
    fields: Any = {"model": "target", "messages": messages, "seed": 3, "max_completion_tokens": 12}
    answers = []
    for client in clients.values():
        whole = await client.chat.completions.create(**fields)
        stream = await client.chat.completions.create(**fields, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        answers.append((whole.choices[0].message.content, whole.choices[0].finish_reason))
        again = await client.chat.completions.create(**fields)
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
        alone = await client.chat.completions.create(**fields, extra_body={"cache_salt": secrets.token_hex()})
        assert alone.usage.prompt_tokens_details.cached_tokens == 0
    sampling = SamplingParams(temperature=1.0)
    prompt = "system: \nuser: sing\nassistant:"
    direct = await complete(target, CompletionRequest(prompt, sampling, seed=3, max_new_tokens=12))
    assert answers == [(direct.text, "length")] * 3


async def test_token_ids_are_those_of_the_text_in_every_topology(clients: Clients, ports: dict[str, int]) -> None:
    found = []
    for name, client in clients.items():
        asked: Any = {"model": "target", "prompt": "one two", "max_tokens": 12, "seed": 5, "temperature": 0.9}
        answer = await client.completions.create(**asked, extra_body={"return_token_ids": True})
        choice = answer.choices[0].model_dump()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[name]}") as http:
            tokens = (await http.post("/tokenize", json={"prompt": "one two"})).json()["tokens"]
            audit = {"request": asked, "output": choice["token_ids"]}
            audited = (await http.post("/v1/audit", json=audit)).json()
        assert choice["prompt_token_ids"] == tokens
        assert len(choice["token_ids"]) == 12
        found.append((choice["prompt_token_ids"], choice["token_ids"], audited["holds"]))
    assert found == [found[0]] * len(clients)
    assert found[0][-1] is True


async def test_logprobs_agree_between_topologies_and_shapes(clients: Clients) -> None:
    messages: Any = [{"role": "user", "content": "sing"}]
    fields: Any = {"model": "target", "max_tokens": 10, "seed": 2}
    values = []
    for client in clients.values():
        old = (await client.completions.create(prompt=PROMPT, logprobs=3, **fields)).choices[0].logprobs
        assert all(len(top) in (3, 4) for top in old.top_logprobs or [None])  # the chosen token may be none of the best
        assert all(token in top for token, top in zip(old.tokens or [], old.top_logprobs or [], strict=True))
        chat = await client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **fields)
        new = chat.choices[0].logprobs
        assert [len(entry.top_logprobs) for entry in new.content] == [2] * 10
        token_bytes = b"".join(bytes(entry.bytes or []) for entry in new.content)
        assert chat.choices[0].message.content is not None
        assert token_bytes.decode(errors="replace") == chat.choices[0].message.content
        values.append([*old.token_logprobs, *(entry.logprob for entry in new.content)])
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert values[0] == pytest.approx(values[2], abs=1e-4)


async def test_tokens_are_those_of_the_model_behind(ports: dict[str, int], models: ModelDirectories) -> None:
    tokenizer = Tokenizer.load(models.target)
    for port in ports.values():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = (await client.post("/tokenize", json={"prompt": PROMPT})).json()
            assert tuple(answer["tokens"]) == tokenizer.encode(PROMPT)
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
            chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "sing"}]})).json()
            assert tuple(chat["tokens"]) == tokenizer.encode("user: sing\nassistant:")
            text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
            assert text.endswith(PROMPT)
            unknown = await client.post("/detokenize", json={"tokens": [999]})
            assert (unknown.status_code, "288" in unknown.json()["error"]["message"]) == (400, True)


async def metrics_of(port: int) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics")).text


def value(exposition: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in exposition.splitlines() if re.match(rf"{name}[{{ ]", line))


async def test_dashboard_queries_find_their_series(clients: Clients, ports: dict[str, int]) -> None:
    """Gateways and servers have every metric and every label that the Grafana dashboard in deploy/ asks for."""
    with pytest.raises(openai.BadRequestError):
        await clients["distributed"].completions.create(model="target", prompt=[999])
    await texts(clients["distributed"], max_tokens=8)
    exposition = "".join([await metrics_of(ports[name]) for name in ("distributed", "fused")])
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "specdec.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for each in expressions for name in re.findall(r"(?:vllm:|specdec_|process_)\w+", each)}
    assert len(names) >= 14
    for name in names:
        if name.startswith(("specdec_account_", "specdec_upstream_")):  # only with an auth file, or by a gateway
            continue
        assert re.search(rf"^{name}[{{ ]", exposition, re.MULTILINE), name
    for label in {label for each in expressions for label in re.findall(r"sum by \((\w+)\)", each)} - {
        "account",
        "server",
    }:
        assert f'{label}="' in exposition


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(models: ModelDirectories) -> AsyncGenerator[tuple[ServerProcess, int], None]:
    """Start a server that runs one request at a time, without a queue, with a model whose texts have no end.

    Yield the server and its HTTP port.
    """
    port = free_port()
    flags = ("--http_port", str(port), "--batch", "1", "--max_waiting", "0", "--grace_s", "20")
    async with fused_server(models.endless, models.endless, *flags) as server:
        yield server, port


async def until_running(port: int, num_requests: int) -> None:
    async with asyncio.timeout(60):
        while value(await metrics_of(port), "vllm:num_requests_running") != num_requests:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_a_client_that_leaves_frees_its_slot(slow: tuple[ServerProcess, int]) -> None:
    """A client that disconnects frees its slot, whether its answer is streamed or not.

    While a request occupies the only slot, other requests are refused with a time to retry.
    """
    client = client_of(slow[1])
    for stream in (True, False):
        call = asyncio.create_task(
            client.completions.create(model="endless", prompt=PROMPT, max_tokens=8000, stream=stream)
        )
        await until_running(slow[1], 1)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="endless", prompt=PROMPT)
        assert int(full.value.response.headers["retry-after"]) >= 1
        if stream:
            await (await call).close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until_running(slow[1], 0)
    await client.close()


async def test_sigterm_lets_a_stream_end_and_refuses_new_ones(slow: tuple[ServerProcess, int]) -> None:
    """After SIGTERM a stream ends normally, and new requests are refused.

    The server ends here, so this test is the last one.
    """
    server, port = slow
    client = client_of(port)
    stream = await client.completions.create(model="endless", prompt=PROMPT, max_tokens=300, stream=True)
    server.process.send_signal(signal.SIGTERM)
    assert len([chunk async for chunk in stream]) == 300
    with pytest.raises(openai.APIConnectionError):
        await client_of(port).completions.create(model="endless", prompt=PROMPT)
    assert await server.process.wait() == 0
    await client.close()
