"""Write a Llama model with wider attention heads and the same output, for kernels that know few sizes of heads.

    python -m benchmarks.wide_heads models/target build/wide/target

vLLM's attention on a CPU takes heads of 32, 64, 80, 96, 112 or 128 values; the bundled models have 72 and 40. Zeros
fill the new places. Rotary embeddings turn value i of a head together with value i + half: each half has its zeros.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SIZES = (32, 64, 80, 96, 112, 128)
QUERY, KEY, VALUE, OUTPUT = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")


def widen(source: Path, destination: Path, size: int | None = None) -> None:
    """Write a model with wider attention heads and the same output, in float32.

    Args:
        source: directory of a Llama model in one file of safetensors.
        destination: directory that is made for the result.
        size: values of a head; None takes the smallest of SIZES that is large enough.
    """
    config = json.loads((source / "config.json").read_text())
    narrow = config["head_dim"]
    wide = size or next(each for each in SIZES if each >= narrow)
    shutil.copytree(source, destination, dirs_exist_ok=True)
    # The angles of pair i are theta^(-2i/size): with this base they stay the same.
    theta = config.get("rope_parameters", config)["rope_theta"] ** (wide / narrow)
    rope = {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    config |= {"head_dim": wide, "dtype": "float32", "torch_dtype": "float32", **rope}
    (destination / "config.json").write_text(json.dumps(config, indent=2))
    weights = load_file(source / "model.safetensors")
    wider = {name: _widened(name, weight.float(), narrow, wide) for name, weight in weights.items()}
    save_file(wider, destination / "model.safetensors", metadata={"format": "pt"})


def _widened(name: str, weight: torch.Tensor, narrow: int, wide: int) -> torch.Tensor:
    """Return a weight for heads of `wide` instead of `narrow` values; weights outside attention stay as they are."""
    if name.endswith(OUTPUT):
        return _spread(weight.T, narrow, wide).T.contiguous()
    if name.endswith((QUERY, KEY)):
        return _spread(weight * (wide / narrow) ** 0.25, narrow, wide)  # attention divides by the root of the size
    return _spread(weight, narrow, wide) if name.endswith(VALUE) else weight


def _spread(rows: torch.Tensor, narrow: int, wide: int) -> torch.Tensor:
    """Return rows of heads, [num_heads * narrow, width], with zeros after each half: [num_heads * wide, width]."""
    halves = rows.reshape(-1, narrow // 2, rows.shape[1])
    padded = torch.zeros(len(halves), wide // 2, rows.shape[1])
    padded[:, : narrow // 2] = halves
    return padded.reshape(-1, rows.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--size", type=int, help="values of a head (default: the next that vLLM has on a CPU)")
    arguments = parser.parse_args()
    widen(arguments.source, arguments.destination, arguments.size)


if __name__ == "__main__":
    main()
