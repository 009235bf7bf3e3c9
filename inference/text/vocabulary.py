"""Vocabulary that draft and target must share, whichever process they run in."""

from __future__ import annotations

from dataclasses import dataclass

from inference.errors import IncompatibleDraftError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of a model and their meaning.

    Attributes:
        fingerprint: hash of the tokenizer's vocabulary.
        size: rows of the output layer.
    """

    fingerprint: str
    size: int


def require_one_vocabulary(draft: Vocabulary, target: Vocabulary) -> None:
    """Refuse a draft with token ids that mean something else than the target's.

    Raises:
        IncompatibleDraftError: they differ; the message names both.
    """
    if draft != target:
        raise IncompatibleDraftError(
            "draft and target need one vocabulary: "
            f"the draft has tokenizer {draft.fingerprint} with {draft.size} tokens, "
            f"the target has tokenizer {target.fingerprint} with {target.size} tokens"
        )
