"""What draft and target must agree on, whichever process they live in."""

from __future__ import annotations

from dataclasses import dataclass

from inference.errors import IncompatibleDraftError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids there are, and what they mean.

    Attributes:
        fingerprint: hash of the tokenizer's vocabulary.
        size: rows of the output layer.
    """

    fingerprint: str
    size: int


def require_one_vocabulary(draft: Vocabulary, target: Vocabulary) -> None:
    """Refuse a draft whose token ids mean something else than the target's.

    Raises:
        IncompatibleDraftError: naming both.
    """
    if draft != target:
        raise IncompatibleDraftError(
            "draft and target need one vocabulary: "
            f"the draft has tokenizer {draft.fingerprint} with {draft.size} tokens, "
            f"the target has tokenizer {target.fingerprint} with {target.size} tokens"
        )
