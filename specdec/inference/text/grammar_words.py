"""Tokens of a model for llguidance: the bytes that each one adds to a text, and the tokens of a grammar's literals.

llguidance's own reading of a tokenizer finds special tokens in the literals of a grammar. Their bytes are not those of
the literal, so that no output would match it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from specdec.inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_UNWRITTEN = "\U0010fffe{}\U0010fffe"  # no character: in no text
_NOTHING_BEFORE: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


class GrammarWords:
    """Tokens of a model, with the attributes that `llguidance.TokenizerWrapper` reads.

    Special tokens, end-of-sequence tokens and the markers of calls and reasoning are not text: a grammar can name them
    only by their ids. All other tokens are text.

    Args:
        num_ids: number of token ids of the model's output layer, or of its tokenizer if that has more.
        eos_token_ids: tokens that may end an output.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_token_ids: Collection[int]) -> None:
        self.eos_token_id = min(eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_ids)]
        self._special = {*tokenizer.special_ids, *tokenizer.markers.values(), *eos_token_ids}
        self.special_token_ids = sorted(self._special)
        self._backend, self._encode_bytes = _of_literals(tokenizer.backend, self._special), tokenizer.encode_bytes

    def __call__(self, data: bytes) -> list[int]:
        """Return the token ids that spell a literal, given in UTF-8; empty if the model has no tokens for it.

        The tokenizer's normalizer may change the literal, for example its decomposed characters. Then it is spelled
        without the normalizer.
        """
        usual: list[int] = self._backend.encode(data.decode(), add_special_tokens=False).ids
        return next((ids for ids in (usual, [*self._encode_bytes(data)]) if self._spell(ids, data)), [])

    def _spell(self, token_ids: list[int], data: bytes) -> bool:
        return self._special.isdisjoint(token_ids) and b"".join(map(self.tokens.__getitem__, token_ids)) == data


def words_of(tokenizer: Tokenizer, num_ids: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return llguidance's tokenizer over a model's tokens; with a large vocabulary this takes up to some seconds.

    The parameters are those of `GrammarWords`.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(GrammarWords(tokenizer, num_ids, eos_token_ids))
    return LLTokenizer(wrapped, n_vocab=num_ids, eos_token=sorted(eos_token_ids))


def _of_literals(backend: Backend, special: Collection[int]) -> Backend:
    """Return a tokenizer for a grammar's literals, made of a model's tokenizer.

    It puts no space before a text, and finds no tokens of the ids `special` in it.
    """
    steps = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    given = {name: json.loads(step.__getstate__()) for name, step in steps.items() if step is not None}
    fields = {name: _within(given.get(name)) for name in steps}
    own = Backend.from_str(json.dumps({**fields, "added_tokens": [], "model": _NO_MODEL}))
    own.model = backend.model  # shared: large
    # The ids of other added tokens count on the place of a special one, unless it is in the model's own vocabulary.
    own.add_tokens(
        [
            _UNWRITTEN.format(token_id) if token_id in special else token
            for token_id, token in sorted(backend.get_added_tokens_decoder().items())
            if token_id not in special or backend.model.token_to_id(token.content) is None
        ]
    )
    return own


def _within(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer, as tokenizer.json describes it, changed to put no space before a text.

    A normalizer of type Prepend, which does nothing else, becomes None; what is neither is returned unchanged.
    """
    if isinstance(part, list):
        return [_within(each) for each in part if not (isinstance(each, dict) and each.get("type") == "Prepend")]
    if not isinstance(part, dict) or part.get("type") == "Prepend":
        return None if isinstance(part, dict) else part
    return {key: _within(each) for key, each in part.items()} | _NOTHING_BEFORE.get(part.get("type", ""), {})
