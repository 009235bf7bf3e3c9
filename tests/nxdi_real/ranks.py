"""Runs compiled models on two ranks: `torch.distributed.run --nproc_per_node 2 -m tests.nxdi_real.ranks FOLDER`.

Every rank makes the same calls, as the cores of one process do on a device; rank 0 prints the results, one JSON object
per line. FOLDER is for models and artifacts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.neuron.decoders.fused import load_fused_decoder
from specdec.inference.config import ModelConfig, NeuronOptions
from specdec.inference.model.decoder import Turn
from specdec.inference.model.slots import Span
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.speculation.slot_decoder import decide
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.neuron.engines import greedy_reference

K = 4
NUM_SLOTS = 3
NUM_TOKENS = 12
TOKENS = tuple(range(20, 60))
PROMPTS = (TOKENS[:1], TOKENS[3:10], TOKENS[5:31])
SCATTERED = {"sequence_parallel_enabled": True}


def config(path: Path, **options: Any) -> ModelConfig:
    neuron = NeuronOptions(tp_degree=2, **options)
    return ModelConfig(path, backend="neuron", dtype="float32", sequence_length=60, num_slots=NUM_SLOTS, neuron=neuron)


def slots(target: Path, **overrides: Any) -> dict[str, Any]:
    """Compare the logits of a target on backend neuron with Transformers', for prompts and later tokens.

    Return the largest difference as "error", and the degree of tensor parallelism as "tp_degree". `overrides` are
    settings of NxDI.
    """
    backend = load_neuron_backend(config(target, gamma=K - 1, overrides=overrides))
    prompts = backend.forward([Span(slot, 0, tokens, 1) for slot, tokens in enumerate(PROMPTS)])
    passes = backend.forward([Span(2, 26, TOKENS[:K], K), Span(0, 1, TOKENS[7:9], 2)])
    wanted = [_logits(target, tokens)[-1:] for tokens in PROMPTS]
    wanted += [_logits(target, PROMPTS[2] + TOKENS[:K])[-K:], _logits(target, PROMPTS[0] + TOKENS[7:9])[-2:]]
    error = np.abs(np.concatenate([prompts, passes]) - np.concatenate(wanted)).max()
    return {"error": float(error), "tp_degree": backend._application.neuron_config.tp_degree}  # type: ignore[attr-defined]


def _logits(target: Path, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(target)
    logits: np.ndarray[Any, Any] = model(torch.tensor([tokens])).logits[0].detach().numpy()
    return logits


def pair(target: Path, draft: Path, *, method: str, device_sampling: bool = False, **overrides: Any) -> dict[str, Any]:
    """Decode greedily with target and draft in one graph; return whether the tokens are Transformers', as "equal".

    `method` is fused, eagle or eagle3. `overrides` are settings of NxDI.
    """
    options = {"method": method, "overrides": overrides, "device_sampling": device_sampling}
    decoder = load_fused_decoder(config(target, gamma=K, **options), config(draft, **options), decide)
    assert decoder is not None
    sequences = [list(prompt) for prompt in PROMPTS]
    starts = [0] * NUM_SLOTS
    while min(len(tokens) - len(prompt) for tokens, prompt in zip(sequences, PROMPTS, strict=True)) < NUM_TOKENS:
        turns = [Turn(slot, starts[slot], list(t), SamplingParams(), gamma=K) for slot, t in enumerate(sequences)]
        for turn, verdict in zip(turns, decoder.step(turns), strict=True):
            starts[turn.slot] = len(turn.token_ids) + len(verdict.token_ids) - 1
            sequences[turn.slot] += verdict.token_ids
    outputs = [tokens[len(p) :][:NUM_TOKENS] for tokens, p in zip(sequences, PROMPTS, strict=True)]
    wanted = [GenerationRequest(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    return {"equal": outputs == greedy_reference(target, wanted)}


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """Run each check of this module; yield its results, with its name as "name"."""
    target = save_tiny_model(folder / "target", "llama", seed=1, eos_token_id=None)
    draft = save_tiny_model(folder / "draft", "llama", seed=2, eos_token_id=None)
    deep = save_tiny_model(folder / "deep", "llama", seed=1, num_hidden_layers=8, eos_token_id=None)
    eagle, eagle3 = (save_eagle_draft(folder / method, method) for method in ("eagle", "eagle3"))
    yield {"name": "slots", **slots(target)}
    yield {"name": "slots, scattered", **slots(target, **SCATTERED)}
    yield {"name": "fused", **pair(target, draft, method="fused")}
    yield {"name": "fused on the device", **pair(target, draft, method="fused", device_sampling=True)}
    yield {"name": "fused, scattered", **pair(target, draft, method="fused", **SCATTERED)}
    yield {"name": "eagle", **pair(target, eagle, method="eagle")}
    yield {"name": "eagle, scattered", **pair(target, eagle, method="eagle", **SCATTERED)}
    yield {"name": "eagle3", **pair(deep, eagle3, method="eagle3")}


def main() -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    folder = Path(sys.argv[1]) / rank  # each rank shards for itself here: their artifacts must not meet
    os.environ["NEURON_COMPILED_ARTIFACTS"] = str(folder / "artifacts")
    for result in results(folder):
        if rank == "0":
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
