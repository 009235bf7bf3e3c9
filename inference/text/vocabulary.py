"""Vocabulary that draft and target must share, whichever process they run in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from inference.checkpoint_files import CheckpointFiles
from inference.errors import IncompatibleDraftError
from inference.text.tokenizer import Tokenizer

MAX_VOCAB_SIZE = 1 << 20
"""Most rows of an output layer; a peer that names more could make this process fill its memory."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of a model and their meaning.

    Attributes:
        fingerprint: hash of the tokenizer's vocabulary.
        size: rows of the output layer: the tokenizer's ids, and often some more that pad it.

    Raises:
        IncompatibleDraftError: the size is above `MAX_VOCAB_SIZE`.
    """

    fingerprint: str
    size: int

    def __post_init__(self) -> None:
        if self.size > MAX_VOCAB_SIZE:
            raise IncompatibleDraftError(f"a vocabulary of {self.size} tokens exceeds the limit of {MAX_VOCAB_SIZE}")

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the vocabulary of the model in a directory, by its tokenizer and its config.json.

        Raises:
            ConfigError: either cannot be read.
        """
        return cls(Tokenizer.load(path).fingerprint, CheckpointFiles(path).vocab_size)

    def share_of(self, target_size: int) -> float:
        """Return the share of a target's ids that this vocabulary has, 0 to 1."""
        return min(self.size, target_size) / target_size


def require_one_vocabulary(draft: Vocabulary, target: Vocabulary, *, one_size: bool = False) -> None:
    """Refuse a draft with token ids that mean something else than the target's.

    Args:
        one_size: refuse other sizes too; without it, two paddings of one tokenizer's vocabulary fit.

    Raises:
        IncompatibleDraftError: they differ; the message names both.
    """
    if draft.fingerprint != target.fingerprint or (one_size and draft.size != target.size):
        raise IncompatibleDraftError(
            "draft and target need one vocabulary: "
            f"the draft has tokenizer {draft.fingerprint} with {draft.size} tokens, "
            f"the target has tokenizer {target.fingerprint} with {target.size} tokens"
        )
