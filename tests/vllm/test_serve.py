"""Tests that `vllm serve` with this project's configuration and a draft pool gives the texts of plain `vllm serve`.

The tests run in this order: some of them end the pool, and the last ones vLLM.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.request import Noise
from specdec.inference.serving.assembly import running
from tests.support.engine_contract import MODES, PROMPT, completed, onnx_engine, wanted
from tests.support.raw_worker import RawWorker, after, end_of, proposing
from tests.vllm.conftest import LAW, MAX_LENGTH, Pair
from tests.vllm.serve_site import LETTERS, NUM_TOKENS, TOKEN, Site, body_of, sites

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

NUM_LATE = 60
"""Number of commits to which the late draft worker of a test reacts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    site = Site(tmp_path_factory.mktemp("serve"), pair)
    async with sites(site):
        await site.start_vllm()
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right(site: Site) -> dict[str, list[Any]]:
    """Return the answers of vLLM's server while there is no draft pool."""
    return await site.answers()


async def test_a_server_alone_has_the_tokens_of_our_own_engine(site: Site, right: dict[str, list[Any]]) -> None:
    async with running(onnx_engine(site.pair.target, MAX_LENGTH, LAW)) as onnx:
        for mode in MODES:
            tokens, _ = await completed(onnx, wanted(mode, max_new_tokens=NUM_TOKENS))
            assert right[mode][0][0] == tokens, mode


async def test_fields_of_vllm_are_kept(right: dict[str, list[Any]]) -> None:
    assert set(right["allowed tokens"][0][0]) <= set(LETTERS)
    banned = {79, 76}  # tokens of these words
    assert LAW is Noise.VLLM or banned <= set(right["noise"][0][0])
    assert not banned & set(right["words that may not be"][0][0])
    assert len(right["minimum length"][0][0]) > 12
    assert right["two answers"][0] != right["two answers"][1]
    assert right["two answers"][0][0] == right["noise"][0][0]
    assert LAW is Noise.VLLM or right["stop string"][0][2] == "stop"


@pytest.mark.parametrize("gamma", [65, "no"])
async def test_a_wrong_gamma_is_refused_by_name(site: Site, right: dict[str, list[Any]], gamma: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"vllm_xargs.gamma '?{gamma}'? must be an integer in"):
        await site.ask({**body_of("noise"), "vllm_xargs": {"gamma": gamma}})
    assert await site.ask(body_of("noise")) == right["noise"]


async def test_a_request_without_a_seed_gets_one_of_its_own(site: Site) -> None:
    one, other = [await site.ask({"temperature": 1.0}) for _ in range(2)]
    assert one != other


async def test_a_pool_answers_no_client(site: Site) -> None:
    await site.start_pool()
    ca, token = (site.folder / "tls" / "ca.pem").read_bytes(), (("authorization", f"Bearer {TOKEN}"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{site.pool_port}", grpc.ssl_channel_credentials(ca)) as channel:
        stub, request = rpc.GenerationServiceStub(channel), pb.GenerateRequest(text="a")
        code, told = await end_of(stub.Generate(request, metadata=token, timeout=30))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "vLLM" in told
        assert (await end_of(stub.Generate(request, timeout=30)))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_lying_worker_is_detached_and_changes_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    """A draft worker that proposes a token id beyond the vocabulary is detached, and changes no answer.

    It never gets the requests' cache salts, which keep the cached prefixes of different users apart.
    """
    async with site.raw_worker() as worker:
        lying = asyncio.create_task(_lie(worker))
        while not lying.done():
            assert await site.ask({**body_of("noise"), "cache_salt": "a secret"}) == right["noise"]
        assert b"a secret" not in await lying
        assert (await end_of(worker.call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def _lie(worker: RawWorker) -> bytes:
    """Propose an invalid token for each session the worker gets, until the stream ends; return the bytes it got."""
    sent = b""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await worker.call.read()) != grpc.aio.EOF:
            sent += message.SerializeToString()
            if message.WhichOneof("message") == "open":
                await worker.call.write(proposing(message.open.session_id, after(1, 2**31)))
    return sent


async def test_a_late_worker_changes_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    """A draft worker that attaches in the middle of an answer, and proposes tokens too late, changes no answer."""
    ((tokens, *_),) = right["noise"]
    answer = site.stream(body_of("noise"))
    got = await anext(answer)
    async with site.raw_worker() as worker:
        late = asyncio.create_task(_answer_late(worker, tokens))
        async for part in answer:
            got += part
        assert got == tokens
        while not late.done():
            assert await site.ask(body_of("noise")) == right["noise"]
        await late
        assert not worker.call.done()


async def _answer_late(worker: RawWorker, tokens: Sequence[int]) -> None:
    """Propose tokens of the answer twice after each of NUM_LATE commits: some passes too late, and after its end."""

    async def propose(name: str, end: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with worker.writes:
            await worker.call.write(proposing(name, after(end, *tokens[end - len(PROMPT) :][:4])))

    async with asyncio.TaskGroup() as proposals:
        num_commits = 0
        while num_commits < NUM_LATE:
            message = await worker.call.read()
            assert message != grpc.aio.EOF
            end = message.commit.commit.position + len(message.commit.commit.token_ids)
            if message.HasField("commit") and end < len(PROMPT) + len(tokens):
                num_commits += 1
                for delay_s in (0.05, 2.0):
                    proposals.create_task(propose(message.commit.session_id, end, delay_s))


async def test_drafts_of_a_pool_help_and_change_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_draft()
    await site.until_helped(right)


async def test_gamma_0_switches_drafts_off(site: Site, right: dict[str, list[Any]]) -> None:
    before = await site.num_accepted()
    fields = {"temperature": 0.8, "seed": 7, "vllm_xargs": {"gamma": 0}}
    answers = await asyncio.gather(*(site.ask(fields) for _ in range(4)))
    assert answers == [right["noise"]] * 4
    assert await site.num_accepted() == before


async def test_a_pool_that_is_killed_changes_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    assert site.pool is not None
    assert await site.answers(disturb=site.pool.kill) == right
    await site.pool.wait()
    assert await site.answers() == right


@pytest.mark.release
async def test_the_next_pool_has_the_workers_of_the_last(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_pool()
    await site.until_helped(right)


@pytest.mark.release
async def test_two_workers_change_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_draft()
    await site.start_draft()
    await site.until_helped(right)
    assert await site.answers(disturb=site.drafts[-1].kill) == right


@pytest.mark.release
async def test_a_stopped_pool_holds_no_request_up(site: Site, right: dict[str, list[Any]]) -> None:
    assert site.pool is not None
    site.pool.send_signal(signal.SIGSTOP)
    try:
        assert await site.answers() == right
    finally:
        site.pool.send_signal(signal.SIGCONT)
    await site.until_helped(right)


@pytest.mark.release
async def test_vllm_is_restarted_under_the_pool(site: Site, right: dict[str, list[Any]]) -> None:
    await site.end_vllm()
    await site.start_vllm()
    await site.until_helped(right)
