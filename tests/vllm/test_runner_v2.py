"""Tests of this project's engine on vLLM's model runner V2 on a CPU, where Triton's kernels are interpreted."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.config import ROOT, ServerConfig
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import GenerationRequest, Noise, SamplingParams
from specdec.inference.serving.assembly import running
from specdec.inference.vllm.hooks import installed, read_hooks
from specdec.inference.vllm.options import VllmModel
from specdec.inference.vllm.translation import own_fields
from tests.support.engine_contract import MODES, REGEX, Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, INTERPRETED, MAX_LENGTH, Pair
from tests.vllm.heads import add_mtp_layer, save_flat_target, save_head

pytestmark = pytest.mark.skipif(
    tuple(map(int, installed().split(".")[:2])) < (0, 32), reason=f"runner V2 of vLLM {installed()} lacks names"
)


def test_this_vllm_has_every_name_that_both_runners_need() -> None:
    hooks = read_hooks()
    assert hooks is not None
    assert hooks.missing == {"V1": [], "V2": []}


SMOKE = ("noise", "penalties of the output")


async def right_tokens(pair: Pair, requests: Mapping[str, GenerationRequest]) -> dict[str, list[int]]:
    """Return, by name, the tokens that this project's own engine gives to requests with vLLM's random numbers."""
    async with running(onnx_engine(pair.target, MAX_LENGTH, Noise.VLLM)) as onnx:
        return {name: (await completed(onnx, request))[0] for name, request in requests.items()}


@asynccontextmanager
async def engine_on_v2(pair: Pair, monkeypatch: pytest.MonkeyPatch, **model: Any) -> AsyncGenerator[Any, None]:
    """Run an engine on vLLM's model runner V2, whose processes interpret Triton's kernels; this process does not.

    Args:
        model: further fields of `VllmModel`.
    """
    from vllm.sampling_params import SamplingParams

    from specdec.inference.serving.vllm_target import vllm_engine

    kept = SamplingParams._validate_spec_decode  # which is replaced, but not for tests after this one
    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", kept)
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as this process would find, had it the environment
    asked = VllmModel(pair.target, **{"flags": FLAGS, "gamma": 16, **model})
    async with vllm_engine(asked, ServerConfig(max_waiting=2)) as (held, _):
        engine: Any = held.engine
        assert held.noise is Noise.VLLM
        assert engine._llm.vllm_config.use_v2_model_runner
        yield engine


async def test_an_engine_has_the_tokens_of_vllms_law(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of `right_tokens`: without drafts, with partly wrong drafts, and after a resume."""
    requests = {mode: wanted(mode, max_new_tokens=28) for mode in SMOKE}
    right = await right_tokens(pair, requests)
    async with engine_on_v2(pair, monkeypatch) as engine:
        accepted = 0
        for mode, request in requests.items():
            tokens = right[mode]
            assert (await completed(engine, request))[0] == tokens
            drafted, commits = await completed(engine, request, Drafting(tokens, 0.3, random.Random(5)))
            assert drafted == tokens
            accepted += sum(commit.num_accepted_tokens for commit in commits)
            assert (await completed(engine, request.resumed(tokens[:10])))[0] == tokens[10:]
        assert accepted > 0


FUSED: dict[str, Any] = {"gamma": 3, "flags": (*FLAGS, "--num-gpu-blocks-override", "40")}


@pytest.mark.release
async def test_a_draft_model_in_vllm_changes_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own speculation by a draft model, tokens are those without, and some drafts are accepted.

    This holds for all modes of sampling, in batches, and for resumed requests.
    """
    requests = {mode: wanted(mode, max_new_tokens=28) for mode in MODES}
    requests["grammar"] = wanted(grammar=REGEX, stop_at_eos=True)
    right = await right_tokens(pair, requests)
    async with engine_on_v2(pair, monkeypatch, draft=str(pair.draft), method="draft_model", **FUSED) as engine:
        answers = await asyncio.gather(*(completed(engine, request) for request in [*requests.values()][:4]))
        answers += await asyncio.gather(*(completed(engine, request) for request in [*requests.values()][4:]))
        assert dict(zip(requests, (tokens for tokens, _ in answers), strict=True)) == right
        commits = [commit for _, each in answers for commit in each]
        assert 0 < sum(each.num_accepted_tokens for each in commits) < sum(each.num_draft_tokens for each in commits)
        for mode in ("penalties of the output", "grammar"):
            tokens = right[mode]
            assert (await completed(engine, requests[mode].resumed(tokens[:10])))[0] == tokens[10:]
        _, plain = await completed(engine, wanted(gamma=0))
        assert sum(commit.num_draft_tokens for commit in plain) == 0


@pytest.mark.release
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_a_head_in_vllm_changes_no_text(
    method: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random EAGLE head changes no token; some of its drafts are accepted, drawn with the target's random numbers."""
    flat, head = replace(pair, target=save_flat_target(tmp_path / "target")), save_head(tmp_path / method, method)
    requests = {mode: wanted(mode, max_new_tokens=28) for mode in ("greedy", "noise", "penalties", "bias")}
    right = await right_tokens(flat, requests)
    async with engine_on_v2(flat, monkeypatch, draft=str(head), method=method, **FUSED) as engine:
        answers = {mode: await completed(engine, request) for mode, request in requests.items()}
    assert {mode: tokens for mode, (tokens, _) in answers.items()} == right
    assert sum(commit.num_accepted_tokens for _, commits in answers.values() for commit in commits) > 0


@pytest.mark.release
async def test_a_layer_for_further_tokens_changes_no_text(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random MTP layer (as in MiMo, for one more token) changes no token; some of its drafts are accepted."""
    flat = replace(pair, target=save_flat_target(tmp_path / "target", "qwen2", hidden_size=128))
    requests = {mode: wanted(mode, max_new_tokens=28) for mode in ("greedy", "noise", "penalties", "bias")}
    right = await right_tokens(flat, requests)
    mimo = replace(flat, target=add_mtp_layer(flat.target, tmp_path / "mimo"))
    async with engine_on_v2(mimo, monkeypatch, method="mtp", **FUSED | {"gamma": 1}) as engine:
        answers = {mode: await completed(engine, request) for mode, request in requests.items()}
    assert {mode: tokens for mode, (tokens, _) in answers.items()} == right
    assert sum(commit.num_accepted_tokens for _, commits in answers.values() for commit in commits) > 0


@pytest.mark.release
async def test_a_resumed_grammar_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a grammar that is resumed after any number of its tokens gets the rest of its text.

    The grammar first reads the output so far. A minimum length counts on from there, too.
    """
    request = wanted(grammar=REGEX, stop_at_eos=True)
    tokens = (await right_tokens(pair, {"": request}))[""]
    async with engine_on_v2(pair, monkeypatch) as engine:
        assert (await completed(engine, request))[0] == tokens
        for num_moved in range(1, len(tokens), 5):
            assert (await completed(engine, request.resumed(tokens[:num_moved])))[0] == tokens[num_moved:]
        minimum = wanted("greedy", min_new_tokens=12, stop_token_ids=frozenset(range(97, 123)))
        whole, _ = await completed(engine, minimum)
        assert (await completed(engine, minimum.resumed(whole[:5])))[0] == whole[5:]


@pytest.mark.parametrize("fields", [{"temperature": 2.5}, {"temperature": 1.0, "seed": 2**64 - 1}])
async def test_what_vllm_lacks_is_refused_by_name(fields: dict[str, Any]) -> None:
    from vllm import SamplingParams as VllmParams
    from vllm.exceptions import VLLMValidationError

    request = GenerationRequest((1, 2), SamplingParams(**fields))
    with pytest.raises((InvalidRequestError, VLLMValidationError), match=r"temperature must be|seed \d+ is not valid"):
        VllmParams(**own_fields(request, 10))


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests",
    [
        ("test_engine.py",),
        ("test_servers.py", "-k", "draft_worker or lost_core"),
        ("test_serve_several.py", "-m", "release", "-k", "runner_v2"),
    ],
    ids=["engine", "servers", "pool beside vLLM"],
)
async def test_runner_v2_passes(tests: tuple[str, ...]) -> None:
    """With vLLM's runner V2, the chosen tests of the other files pass."""
    file, *chosen = tests
    program = (sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", "--timeout", "900")
    process = await asyncio.create_subprocess_exec(
        *program,
        str(ROOT / "tests" / "vllm" / file),
        *chosen,
        cwd=ROOT,
        env={**os.environ, **INTERPRETED},
    )
    assert await process.wait() == 0
