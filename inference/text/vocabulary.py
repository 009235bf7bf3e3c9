"""Vocabulary that draft and target must share, whichever process they run in."""

from __future__ import annotations

from dataclasses import dataclass

from inference.errors import IncompatibleDraftError

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

    def share_of(self, target_size: int) -> float:
        """Return the share of a target's ids that this vocabulary has, 0 to 1."""
        return min(self.size, target_size) / target_size


def require_one_vocabulary(draft: Vocabulary, target: Vocabulary) -> None:
    """Refuse a draft with token ids that mean something else than the target's; other paddings of the same ids fit.

    Raises:
        IncompatibleDraftError: they differ; the message names both.
    """
    if draft.fingerprint != target.fingerprint:
        raise IncompatibleDraftError(
            "draft and target need one vocabulary: "
            f"the draft has tokenizer {draft.fingerprint} with {draft.size} tokens, "
            f"the target has tokenizer {target.fingerprint} with {target.size} tokens"
        )
