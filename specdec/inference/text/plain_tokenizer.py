"""Tokenizer without Transformers, for models whose tokenizer is completely described by tokenizer.json.

Transformers imports torch to make a tokenizer, which takes seconds and some 300 MB; a server on ONNX Runtime can do
without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MANY_IDS = 4096
LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")


class PlainTokenizer:
    """Tokenizer with those methods of Transformers' `PreTrainedTokenizerFast` that this project uses.

    Args:
        backend: the tokenizer in tokenizer.json; its truncation and padding are switched off.
        eos_token: text of the end-of-sequence token; None if there is none.
    """

    chat_template = None
    is_fast = True

    def __init__(self, backend: Backend, eos_token: str | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return a dictionary with the token ids of a text as "input_ids", as Transformers' tokenizers do."""
        # `encode` would keep other threads from running for as long as it takes.
        [encoding] = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of token ids; no spaces are cleaned up, whatever `clean_up_tokenization_spaces` is."""
        if len(token_ids) < MANY_IDS:
            return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        # `decode` would keep other threads from running for as long as it takes; a batch costs more for few ids.
        [text] = self.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added tokens included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return the token with an id, as the vocabulary spells it; None if there is no such id."""
        return self.backend_tokenizer.id_to_token(token_id)


def names_generic_class(path: Path) -> bool:
    """Return whether tokenizer_config.json names a class that reads nothing but tokenizer.json."""
    return _settings(path).get("tokenizer_class") in GENERIC_CLASSES


def load_plain(path: Path) -> PlainTokenizer | None:
    """Return the tokenizer of a model directory; None if Transformers would make a different one of the same files.

    That is so for a tokenizer of a class of its own, with a chat template, or with special tokens that files other than
    tokenizer.json add.
    """
    settings, file = _settings(path), path / "tokenizer.json"
    if not names_generic_class(path) or not file.is_file() or _has_template(path, settings):
        return None
    special = {token["content"] for token in json.loads(file.read_text())["added_tokens"] if token["special"]}
    others = [_settings(path, name) for name in ("special_tokens_map.json", "added_tokens.json")]
    if not all(token in special for fields in (settings, *others) for token in _named(fields)):
        return None
    eos = next(_contents(settings.get("eos_token")), None)
    return PlainTokenizer(Backend.from_file(str(file)), eos)


def _settings(path: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    file = path / name
    fields: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return fields


def _has_template(path: Path, settings: dict[str, Any]) -> bool:
    return bool(settings.get("chat_template")) or any(path.glob("*chat_template*"))


def _named(fields: dict[str, Any]) -> Iterator[str]:
    """Yield every special token that the fields of a tokenizer's JSON file name."""
    for name in (*TOKEN_FIELDS, *LISTS_OF_TOKENS):
        yield from _contents(fields.get(name))


def _contents(value: Any) -> Iterator[str]:
    """Yield the tokens that a field holds: a text, an object with a text as its content, or a list of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield value["content"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _contents(item)
