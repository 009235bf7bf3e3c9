"""Decoding of one sequence by this project's code, without a server in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.model.decoder import Decoder, Turn
from specdec.inference.model.slots import Backend, PrefixKeeper
from specdec.inference.request import SamplingParams
from specdec.inference.text.tokenizer import Tokenizer

GREEDY = SamplingParams()
MAX_LENGTH = 512


def load_model(
    path: Path,
    *,
    backend: str,
    threads: int,
    dtype: str = "auto",
    max_length: int = MAX_LENGTH,
    device: str = "cpu",
    num_slots: int = 1,
    exact: str = "never",
) -> Backend:
    """Load a model by one of this project's backends; by default for one sequence, and without exact arithmetic.

    `exact` is a value of the flag `--exact`, `max_length` the most positions of a sequence.
    """
    config = ModelConfig(
        path,
        backend=backend,
        device=device,
        dtype=dtype,
        num_slots=num_slots,
        exact=exact,
        sequence_length=max_length,
        num_threads=threads,
    )
    return load_backend(config)


def read_prompts(file: Path, count: int) -> list[str]:
    """Return the first `count` lines of a file that are not empty."""
    return [line for line in file.read_text().splitlines() if line.strip()][:count]


def encode_all(prompts: Sequence[str], model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(model)
    return [list(tokenizer.encode(prompt)) for prompt in prompts]


def decode(decoder: Decoder, prompt: Sequence[int], *, gamma: int, num_tokens: int) -> tuple[list[int], int]:
    """Decode `num_tokens` tokens after a prompt greedily; end-of-sequence tokens do not end it.

    Args:
        gamma: draft tokens per pass of the target; 0 decodes without a draft.

    Returns:
        The ids of the new tokens, and the number of passes of the target.
    """
    token_ids = list(prompt)
    num_passes = held = 0
    if isinstance(decoder, PrefixKeeper):
        decoder.begin(0, 0, ())
    while (left := len(prompt) + num_tokens - len(token_ids)) > 0:
        [verdict] = decoder.step([Turn(0, held, token_ids, GREEDY, gamma=min(gamma, left - 1))])
        held = len(token_ids) + verdict.num_accepted_tokens
        token_ids = [*token_ids, *verdict.token_ids]
        num_passes += 1
    return token_ids[len(prompt) :], num_passes
