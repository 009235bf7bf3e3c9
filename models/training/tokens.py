"""Token streams: the encoded corpus on disk and the sampling of training rows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from .corpus import Split, load_code, load_prose
from .schedule import Stage
from .structured import make_documents
from .tokenizer import BOS_ID, EOS_ID

Tokens = npt.NDArray[np.uint16]
KINDS = ("prose", "code", "structured")
STRUCTURED_TRAIN, STRUCTURED_HELD_OUT = 24_000, 300
HELD_OUT_SEED_OFFSET = 1_000_003


def load_documents(corpus: Path, seed: int) -> dict[str, Split]:
    """Load all three kinds of documents, split into training and held-out ones."""
    structured = Split(
        make_documents(STRUCTURED_TRAIN, seed), make_documents(STRUCTURED_HELD_OUT, seed + HELD_OUT_SEED_OFFSET)
    )
    return {"prose": load_prose(corpus, seed), "code": load_code(seed), "structured": structured}


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tokens:
    """Encode documents into one stream, each as `<|bos|> text <|eos|>`; dtype uint16."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids.extend(encoding.ids)
        ids.append(EOS_ID)
    return np.asarray(ids, dtype=np.uint16)


def write_streams(tokenizer: Tokenizer, documents: dict[str, Split], directory: Path) -> dict[str, int]:
    """Encode every split into `directory`; return the number of tokens per file."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for kind, split in documents.items():
        for part, texts in (("train", split.train), ("held_out", split.held_out)):
            stream = encode(tokenizer, texts)
            np.save(directory / f"{kind}_{part}.npy", stream)
            sizes[f"{kind}_{part}"] = len(stream)
    return sizes


def read_stream(directory: Path, kind: str, part: str) -> Tokens:
    """Read one stream written by `write_streams`; dtype uint16, shape (tokens,)."""
    stream: Tokens = np.load(directory / f"{kind}_{part}.npy")
    return stream


@dataclass
class RowSampler:
    """Sampler of rows from one stream, each epoch in a new order, reproducible from `(seed, position)`."""

    stream: Tokens
    seed: int

    def rows(self, first: int, count: int, length: int) -> torch.Tensor:
        """Return rows `first .. first + count` as int64 of shape (count, length + 1); each begins with bos.

        As in use, position 0 is always bos; the forced bos also trains "bos, then the middle of a text".
        """
        per_epoch = (len(self.stream) - 1) // length - 1
        out = np.empty((count, length + 1), dtype=np.int64)
        for row in range(count):
            epoch, index = divmod(first + row, per_epoch)
            rng = np.random.default_rng((self.seed, epoch, length, count))
            offset = int(rng.integers(length))
            start = int(rng.permutation(per_epoch)[index]) * length + offset
            out[row, 0] = BOS_ID
            out[row, 1:] = self.stream[start : start + length]
        return torch.from_numpy(out)


@dataclass
class MixtureSampler:
    """Sampler of batches with the stage's share of rows per kind; `samplers` are in the order of `KINDS`."""

    samplers: list[RowSampler]

    def batch(self, step: int, stage: Stage) -> torch.Tensor:
        """Return the batch of one step in random order, int64 of shape (rows, length + 1)."""
        bounds = np.rint(np.cumsum([0, *stage.shares]) * stage.rows / sum(stage.shares)).astype(int)
        parts: list[torch.Tensor] = []
        for sampler, count in zip(self.samplers, np.diff(bounds).tolist(), strict=True):
            parts.append(sampler.rows(step * count, count, stage.length))
        batch = torch.cat(parts)
        order = torch.from_numpy(np.random.default_rng(step).permutation(len(batch)))
        return batch[order]
