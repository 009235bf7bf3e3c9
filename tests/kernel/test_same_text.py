"""The rule of `vllm_same_text` with vLLM's kernels, in Triton's interpreter: tokens do not follow from drafts."""

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
"""Slot of each request of a pass; the request in the last slot is greedy."""


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    """Let vLLM take Triton on a CPU, where it looks for a backend of this name; the interpreter needs none."""
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
    """Each row has the token that it has alone, and drafts count up to the first that is another token."""
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
    """A draft with the target's logits proposes the target's own token: it has the noise of the same position."""
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
