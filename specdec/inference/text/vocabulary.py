"""Vocabularies of a draft model and its target: a check that they are equal, and a map between two that are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import IncompatibleDraftError
from specdec.inference.model.token_map import TokenMap
from specdec.inference.text.tokenizer import Piece, Tokenizer

MAX_VOCAB_SIZE = 1 << 20
"""Most token ids of a vocabulary. Without a limit, a peer that names a huge number would fill this process's memory."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids in which a model reads and writes.

    A draft model with another tokenizer than its target has a map from the target's token ids to its own (`token_map`),
    and reads and writes the target's.

    Attributes:
        fingerprint: hash of the tokens and their ids (`Tokenizer.fingerprint`); of a draft with a map, the target's.
        size: number of token ids: rows of the model's output layer, often some more than the tokenizer has; of a draft
            with a map, the number of ids of the target's tokenizer.
        num_shared: how many of these ids a draft with a map can propose; None: all.

    Raises:
        IncompatibleDraftError: the size is above `MAX_VOCAB_SIZE`.
    """

    fingerprint: str
    size: int
    num_shared: int | None = None

    def __post_init__(self) -> None:
        if self.size > MAX_VOCAB_SIZE:
            raise IncompatibleDraftError(f"a vocabulary of {self.size} tokens exceeds the limit of {MAX_VOCAB_SIZE}")

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the vocabulary of the model in the directory `path`, by its tokenizer and its config.json.

        Raises:
            ConfigError: either cannot be read.
        """
        return cls(Tokenizer.load(path).fingerprint, CheckpointFiles(path).vocab_size)

    def share_of(self, target_size: int) -> float:
        """Return the share (0 to 1) of a target's `target_size` ids that a draft with this vocabulary can propose."""
        return min(self.size if self.num_shared is None else self.num_shared, target_size) / target_size


def require_one_vocabulary(draft: Vocabulary, target: Vocabulary) -> None:
    """Check that draft and target have the same tokens with the same ids; only their sizes may differ, by padding.

    Raises:
        IncompatibleDraftError: the tokens differ; the message names both vocabularies, and says what to do.
    """
    if draft.fingerprint != target.fingerprint:
        raise IncompatibleDraftError(
            "draft and target need one vocabulary: "
            f"the draft has tokenizer {draft.fingerprint} with {draft.size} tokens, "
            f"the target has tokenizer {target.fingerprint} with {target.size} tokens; "
            "a draft worker with --tokenizer of the target drafts in the target's tokens"
        )


class _OwnIds(dict[int, tuple[int, ...]]):
    """Dictionary from a target's token id to the draft model's token ids for the same bytes.

    An entry is added when it is first looked up. If the draft has a token with just these bytes, the value is its id
    alone; else it is the ids of several tokens that spell them. A special token that the draft lacks has an empty
    value, since it has no text.

    Args:
        own: tokenizer of the draft model.
        own_pieces: what `own.pieces` returns.
        target: tokenizer of the target.
    """

    def __init__(self, own: Tokenizer, own_pieces: Mapping[Piece, int], target: Tokenizer) -> None:
        super().__init__()
        self._own, self._own_pieces, self._target = own, own_pieces, target

    def __missing__(self, token_id: int) -> tuple[int, ...]:
        data, is_special = self._target.token_bytes(token_id), token_id in self._target.special_ids
        same = self._own_pieces.get((data, is_special))
        spelled = () if is_special else self._own.encode_bytes(data)
        own_ids = self[token_id] = spelled if same is None else (same,)
        return own_ids


def token_map(own: Tokenizer, num_rows: int, target: Tokenizer, *, min_share: float) -> TokenMap:
    """Return the map from a target's token ids to those of a draft model that has another tokenizer.

    Args:
        own: tokenizer of the draft model.
        num_rows: number of rows of the draft model's output layer; token ids from there on cannot be proposed.
        min_share: least share (0 to 1) of the target's tokens that the draft model must be able to propose.

    Raises:
        IncompatibleDraftError: the draft has a smaller share, or the target more tokens than any vocabulary may have.
    """
    size = Vocabulary(target.fingerprint, target.num_ids).size  # an id of a peer's tokenizer may be any number
    own_pieces, columns = own.pieces(), np.zeros(size, dtype=np.int64)
    for piece, token_id in target.pieces().items():
        if (own_id := own_pieces.get(piece, num_rows)) < num_rows:
            columns[token_id] = 1 + own_id
    num_shared = int(np.count_nonzero(columns))
    if num_shared < min_share * target.num_ids:
        raise IncompatibleDraftError(
            f"the draft can propose {num_shared} of the target's {target.num_ids} tokens (tokenizers "
            f"{own.fingerprint} and {target.fingerprint}): less than --min_vocabulary_share {min_share:g}"
        )
    own_ids, prefix = _OwnIds(own, own_pieces, target), own.encode("")
    begins = tuple(own_id for token_id in target.encode("") for own_id in own_ids[token_id])
    name = f"{own.fingerprint}:{target.fingerprint}:{num_rows}"
    return TokenMap(target.num_ids, name, columns, own_ids, () if begins == prefix else prefix)
