"""Models to measure: the bundled ones, and models of given sizes with random weights, of which only times count."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET

MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    "target": Shape(288, 12, 4, 4, 768, 2048),
    "draft": Shape(160, 2, 4, 4, 432, 2048),
    "15M": Shape(288, 6, 6, 6, 768, 32000),
    "40M": Shape(512, 8, 8, 2, 1408, 32000),
    "110M": Shape(768, 12, 12, 12, 2048, 32000),
    "1B": Shape(2048, 22, 32, 4, 5632, 32000),
}
BUNDLED = {"target": BUNDLED_TARGET, "draft": BUNDLED_DRAFT}


@contextmanager
def workspace(folder: Path | None) -> Iterator[Path]:
    """Yield a folder for random models and converted weights: `folder`, or a temporary one if it is None."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        yield folder


def checkpoint(name: str, folder: Path) -> Path:
    """Return the directory of a model of SHAPES: the bundled one if it exists, else one with random weights.

    The latter is a folder in `folder`, made if it is missing.
    """
    if name in BUNDLED and any(BUNDLED[name].glob("*.safetensors")):
        return BUNDLED[name]
    path = folder / name
    if not path.exists():
        random_model(SHAPES[name]).save_pretrained(path)
    return path


def random_model(shape: Shape, *, tied: bool = True) -> PreTrainedModel:
    """Return a Llama with random float32 weights, equal at each call; `tied` shares embedding and output layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=32768,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=tied,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model
