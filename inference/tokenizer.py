"""Text to token ids and back. Owns the model directory's tokenizer; knows no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from inference.errors import ConfigError

FINGERPRINT_DIGITS = 16
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class Tokenizer:
    """A fast Hugging Face tokenizer and the model's end-of-sequence ids."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.fingerprint = fingerprint(tokenizer.get_vocab())

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face model directory.

        Raises:
            ConfigError: there is none, or it has no fast form.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer of Transformers 5 goes by the model's family even where the directory names the generic class,
        # so that one tokenizer.json would mean different tokenizers beside a Llama target and a Qwen2 draft.
        loader = PreTrainedTokenizerFast if _names_generic_class(path) else AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(path, local_files_only=True)
        except Exception as exc:  # whatever a broken directory makes transformers raise
            raise ConfigError(f"model {path}: its tokenizer cannot be loaded ({exc})") from exc
        if not tokenizer.is_fast:
            raise ConfigError(f"model {path}: its tokenizer has no tokenizer.json (fast tokenizer)")
        return cls(tokenizer, eos_token_ids(path, tokenizer.eos_token_id))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the model expects around it."""
        return tuple(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens have none."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def stream(self) -> TextStream:
        return TextStream(self, self._tokenizer.backend_tokenizer)


class TextStream:
    """Decodes a growing sequence; the pieces add up to the text of the whole."""

    def __init__(self, tokenizer: Tokenizer, backend: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_characters = 0

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Text that is certain after these tokens; the last call also gives what an unfinished character leaves."""
        self._token_ids.extend(token_ids)
        pieces = (self._stream.step(self._backend, token_id) for token_id in token_ids)
        text = "".join(piece for piece in pieces if piece)
        self._num_characters += len(text)
        return text + self._rest() if last else text

    def _rest(self) -> str:
        return self._tokenizer.decode(self._token_ids)[self._num_characters :]


def _names_generic_class(path: Path) -> bool:
    """Whether the directory says that its tokenizer.json is all there is to its tokenizer."""
    file = path / "tokenizer_config.json"
    return file.is_file() and json.loads(file.read_text()).get("tokenizer_class") in GENERIC_CLASSES


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Hash of which id means which token: the first 16 hex digits of SHA-256 over JSON lines [id, token] by id."""
    lines = (json.dumps([token_id, token]) for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:FINGERPRINT_DIGITS]


def model_vocab_size(path: Path) -> int:
    """Rows of a model's output layer, from its config.json.

    Raises:
        ConfigError: the file does not say.
    """
    fields = json.loads((path / "config.json").read_text())
    size = fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"model {path}: config.json has no vocab_size")
    return size


def eos_token_ids(path: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """End-of-sequence ids as Transformers' generate() sees them: generation_config.json, config.json, tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset() if tokenizer_eos is None else frozenset([tokenizer_eos])
