"""Tests that the plug-in `vllm_same_text` chooses the same tokens with any drafts, in vLLM's interpreted kernels."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="make test-vllm has an environment with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("make test-vllm runs these with TRITON_INTERPRET=1", allow_module_level=True)
import torch

import vllm_same_text

VOCAB_SIZE, NUM_STEPS = 1500, 3
SLOTS = torch.tensor([2, 0, 3])
"""Number of vLLM's slot for each request in a pass; the request in slot 3 is greedy."""


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    """Let vLLM use Triton on a CPU, by registering a backend of that name; Triton's interpreter needs no real one."""
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))


def chosen(logits: torch.Tensor, slots: torch.Tensor, pos: torch.Tensor, drafts: Any, ends: Any) -> tuple[Any, Any]:
    temperature, seeds = torch.tensor([0.8, 9.0, 1.0, 0.0]), torch.tensor([5, 6, 2**62 + 3, 7])
    starts, local = SLOTS[: len(ends) - 1], torch.zeros_like(pos)
    return vllm_same_text.choose(
        logits, None, drafts, ends, pos, starts, slots, local, temperature, seeds, NUM_STEPS, use_fp64=False
    )


@pytest.mark.parametrize("widths", [(1, 1, 1), (4, 4, 4), (4, 1, 2), (2, 3, 4)])
@pytest.mark.parametrize("seed", range(2))
def test_a_token_is_that_of_a_pass_without_drafts(widths: tuple[int, ...], seed: int) -> None:
    """Each row gets the token that it gets alone; draft tokens are accepted up to the first that differs from it."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32)
    logits = torch.randn(sum(widths), VOCAB_SIZE, generator=generator) * 3
    slots = SLOTS.repeat_interleave(torch.tensor(widths))
    pos = torch.cat([torch.arange(start, start + width) for start, width in zip((40, 7, 300), widths, strict=True)])
    nothing, one = torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32)
    alone = [
        int(chosen(logits[row : row + 1], slots[row : row + 1], pos[row : row + 1], nothing, one)[0][0, 0])
        for row in range(sum(widths))
    ]
    drafts = torch.tensor([0, *alone[:-1]])
    wrong = int(torch.randint(sum(widths), (1,), generator=generator))
    drafts[wrong] = (drafts[wrong] + 1) % VOCAB_SIZE
    tokens, counts = chosen(logits, slots, pos, drafts, ends)
    for request, (start, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        assert tokens[request, : end - start].tolist() == alone[start:end]
        assert int(counts[request]) == (wrong - start if start < wrong < end else end - start)


def test_equal_logits_draft_the_targets_token() -> None:
    """A draft with the target's logits proposes the target's token, since both use the position's random numbers."""
    generator = torch.Generator().manual_seed(3)
    logits, pos = torch.randn(3, VOCAB_SIZE, generator=generator), torch.tensor([40, 7, 300])
    temperature, seeds = torch.tensor([0.8, 9.0, 1.0, 0.0]), torch.tensor([5, 6, 2**62 + 3, 7])
    speculator = SimpleNamespace(
        compute_draft_logits=lambda *given: logits, _maybe_predict_acceptance=lambda *given: None, use_fp64_gumbel=False
    )
    drawn = vllm_same_text.sample_draft(speculator, logits, pos, SLOTS, temperature, seeds, pos[:1], None)
    scaled = logits.clone()
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    apply_temperature(scaled, SLOTS, temperature)
    tokens, _ = chosen(scaled, SLOTS, pos, torch.zeros(3), torch.arange(4, dtype=torch.int32))
    assert tokens[:, 0].tolist() == drawn.tolist()
    later, _ = chosen(scaled, SLOTS, pos + 1, torch.zeros(3), torch.arange(4, dtype=torch.int32))
    assert (later[:, 0] == drawn).tolist() == [False, False, True]  # another position is another draw, except greedy


def test_drafts_have_the_targets_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft with the target's logits proposes the target's tokens if top_k, top_p and min_p apply to it too.

    Without them, it proposes some other tokens.
    """
    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import states as module
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)  # as vLLM's worker on a CPU does
    monkeypatch.setattr(module, "apply_top_k_top_p", apply_top_k_top_p_pytorch)  # vLLM's own where there is no Triton
    states, slots = SamplingStates(4, VOCAB_SIZE), SLOTS.numpy()
    cut: list[dict[str, Any]] = [{"top_k": 3}, {}, {"top_p": 0.2}, {"min_p": 0.5}]
    for slot, fields in enumerate(cut):
        states.add_request(slot, SamplingParams(temperature=2.0, seed=slot, **fields))
    states.apply_staged_writes()
    generator = torch.Generator().manual_seed(4)
    logits, pos = torch.randn(3, VOCAB_SIZE, generator=generator), torch.tensor([40, 7, 300])
    right = logits.clone()
    states.apply_temperature(right, SLOTS, slots)
    states.apply_min_p(right, SLOTS, slots)
    right = states.apply_top_k_top_p(right, SLOTS, slots)
    device = states.temperature.gpu, states.seeds.gpu
    ends, nothing = torch.arange(4, dtype=torch.int32), torch.zeros(3)
    tokens, _ = vllm_same_text.choose(right, None, nothing, ends, pos, SLOTS, SLOTS, nothing, *device, NUM_STEPS)
    sampler = SimpleNamespace(
        sampling_states=states, needs_logits_processing=np.array([True] * 4), logits_processors=[]
    )
    batch = SimpleNamespace(idx_mapping_np=slots, seq_lens_cpu_upper_bound=torch.tensor([41, 8, 301]))
    speculator = SimpleNamespace(
        compute_draft_logits=lambda *given: logits, _maybe_predict_acceptance=lambda *given: None, use_fp64_gumbel=False
    )
    drawn = {}
    for limits in (None, batch):
        speculator.same_text_of = (sampler, limits)
        drawn[limits is None] = vllm_same_text.sample_draft(speculator, logits, pos, SLOTS, *device, pos[:1], None)
    assert drawn[False].tolist() == tokens[:, 0].tolist()
    assert drawn[True].tolist() != tokens[:, 0].tolist()
