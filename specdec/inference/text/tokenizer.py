"""Tokenizer of a model directory: it converts texts and conversations to token ids, and token ids to text."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError, IncompatibleDraftError, InvalidRequestError
from specdec.inference.text.calls.formats import HERMES, MARKERS, shown_format
from specdec.inference.text.chat import Chat, one_template
from specdec.inference.text.plain_tokenizer import PlainTokenizer, load_plain, names_generic_class
from specdec.inference.text.reasoning import BEGIN, END
from specdec.inference.text.unicode import check_unicode

FINGERPRINT_DIGITS = 16
MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_REASON_CHARACTERS = 200
"""Limit of a chat template's error message, which is sent to the client."""
ENDS = {"add_generation_prompt", "continue_final_message"}
"""Arguments of Transformers' `apply_chat_template` that a request may set, since they only say how the prompt ends."""
MAX_SILENT_TOKENS = 16  # without text, in a row: more than a character has; each one reads all again
MAX_PACKED_BYTES = 16 * 1024 * 1024
"""Most bytes of a compressed tokenizer that is sent to another process."""
MAX_TOKENIZER_BYTES = 4 * MAX_PACKED_BYTES
"""Most bytes of a received tokenizer after decompression. Without a limit, a few compressed megabytes could fill this
process's memory."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""Space as SentencePiece writes it."""
_ESCAPES = re.compile(f"([^{_SPACE}\udc80-\udcff]*)([{_SPACE}\udc80-\udcff]?)")
"""Text that SentencePiece can spell, and after it perhaps a character that needs tokens of bytes: SentencePiece's own
sign of a space, or an undecodable byte as Python's `surrogateescape` writes it."""
Piece: TypeAlias = tuple[bytes, bool]
"""Bytes of a token, and True if it is a special token, whose bytes are its name."""


class Tokenizer:
    """Tokenizer of a model: a fast Hugging Face tokenizer, with the model's chat template and end-of-sequence ids.

    Args:
        tokenizer: a `PlainTokenizer`, or a fast tokenizer of Transformers.
        eos_token_ids: tokens that end the model's outputs.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        if isinstance(tokenizer.chat_template, dict):
            tokenizer.chat_template = one_template(tokenizer.chat_template)
        self.eos_token_ids = eos_token_ids
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        vocabulary = tokenizer.get_vocab()
        self.fingerprint = fingerprint(vocabulary)
        added = self.backend.get_added_tokens_decoder()
        flags = [[token_id, token.content, token.special] for token_id, token in sorted(added.items())]
        decoder = self.backend.decoder
        written = [self.fingerprint, flags, "" if decoder is None else decoder.__getstate__().decode()]
        self.text_fingerprint = _digest(json.dumps(written))
        """Hash of all that the text of token ids depends on: tokens and their ids, flags of added ones, the decoder."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)  # without a text
        names = {token.content: token_id for token_id, token in added.items()}
        self.markers = {marker: names[marker] for marker in (*MARKERS, BEGIN, END) if marker in names}
        """Ids of added tokens that begin or end a call or a reasoning, by the tokens' names."""
        self.longest_token = max(map(len, vocabulary), default=1)
        """Number of characters of the longest token: a text of n tokens has at most n times as many."""
        self.num_ids = 1 + max(vocabulary.values(), default=-1)
        self.is_slow_to_chat = False
        """True if the chat template comes from another server, so that applying it may take any time, or never end."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Return the tokenizer of a Hugging Face model directory.

        Raises:
            ConfigError: the directory has no tokenizer, or one without a fast form (tokenizer.json).
        """
        tokenizer = _load(path)
        if not tokenizer.is_fast:
            raise ConfigError(f"model {path}: its tokenizer has no tokenizer.json (fast tokenizer)")
        return cls(tokenizer, eos_token_ids(path, tokenizer.eos_token_id))

    def with_template(self, chat_template: str | None, path: Path) -> Tokenizer:
        """Return a tokenizer like this one, but with another chat template, such as that of another server's model.

        Args:
            chat_template: text of the template; None for a model without one.
            path: directory of this tokenizer, which is loaded again, with Transformers if there is a template.

        Raises:
            ConfigError: the tokenizer cannot be loaded, or the template is too long.
        """
        if self.chat_template == chat_template:
            return self
        if len(chat_template or "") > MAX_TEMPLATE_CHARACTERS:
            num_characters = len(chat_template or "")
            raise ConfigError(f"a chat template of {num_characters} characters exceeds {MAX_TEMPLATE_CHARACTERS}")
        other = _load(path, whole=chat_template is not None)
        other.chat_template = chat_template
        tokenizer = Tokenizer(other, self.eos_token_ids)
        tokenizer.is_slow_to_chat = True
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """Return the model's chat template, made of several if it has several by name; None if the model has none."""
        template: str | None = self._tokenizer.chat_template
        return template

    def call_format(self) -> str:
        """Return the name of the format in which the chat template writes tool calls; empty if it is not known."""
        template = self._tokenizer.apply_chat_template if self.chat_template is not None else None
        return shown_format(template and partial(template, tokenize=False))

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; with `special`, add the special tokens that the model expects around it."""
        return tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        """Return the token ids of a conversation as a prompt.

        The model's chat template writes the prompt's text, or `plain_chat` if it has none. The prompt ends where the
        assistant is to answer, unless `template_kwargs` say otherwise.

        Raises:
            InvalidRequestError: the template refuses messages or variables, or tools or calls are not valid JSON.
        """
        others = chat.template_kwargs()
        if self.chat_template is None:
            if ends := others.keys() & ENDS:
                way_out = "so no answer continues an assistant's message: end with a user's"
                raise InvalidRequestError(f"{min(ends)}: the model has no chat template, {way_out}", field=min(ends))
            return self.encode(_speakable(plain_chat(chat)))
        conversation, tools = chat.conversation(), chat.tools()
        if others and (taken := others.keys() & set(signature(self._tokenizer.apply_chat_template).parameters) - ENDS):
            message = f"chat_template_kwargs.{min(taken)} says how the template is used; it is not one of its variables"
            raise InvalidRequestError(message, field="chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, **{"add_generation_prompt": True, **others}
            )
        except Exception as exc:  # whatever the template raises
            spoken = tuple(each for each in chat.messages if each.content or each.role != "system")
            if not spoken or len(spoken) == len(chat.messages):
                reason = " ".join(str(exc).split())[:MAX_REASON_CHARACTERS]
                message = f"messages: the chat template refuses them ({reason})"
                raise InvalidRequestError(message, field="messages") from exc
            # Benchmarks send an empty system message, even to models without system messages.
            return self.encode_chat(replace(chat, messages=spoken))
        return self.encode(_speakable(str(text)), special=False)  # the template has written the special tokens

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be a part of a character.

        For a special token return its name, and for an unknown id nothing.
        """
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return b"" if token is None else self._bytes_of(token)

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            is_text = all(character in _BYTE_OF_CHARACTER for character in token)
            return bytes(_BYTE_OF_CHARACTER[each] for each in token) if is_text else token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(match[1]) if match else token.replace(_SPACE, " ").encode()

    def pieces(self) -> dict[Piece, int]:
        """Return the id of each token, by the token's bytes and whether it is a special token.

        A token for a single byte, such as <0x41>, is listed only if no other token consists of that byte.
        """
        found: dict[Piece, int] = {}
        for token, token_id in sorted(self._tokenizer.get_vocab().items(), key=itemgetter(1)):
            if self._is_byte_level or not _BYTE_TOKEN.fullmatch(token):
                found.setdefault((self._bytes_of(token), token_id in self.special_ids), token_id)
        for byte in range(0 if self._is_byte_level else 256):
            if (token_id := self._id_of_byte(byte)) is not None:
                found.setdefault((bytes([byte]), False), token_id)
        return found

    def encode_bytes(self, data: bytes) -> tuple[int, ...]:
        """Return token ids for bytes in the middle of a text: no space is put before them, and they may be any bytes.

        Bytes for which the tokenizer has no token are left out.
        """
        if self._is_byte_level:
            return self._ids_of("".join(map(_CHARACTERS.__getitem__, data)))
        token_ids: list[int] = []
        for text, other in _ESCAPES.findall(data.decode(errors="surrogateescape")):
            token_ids += self._ids_of(text.replace(" ", _SPACE))
            ids_of_bytes = map(self._id_of_byte, other.encode(errors="surrogateescape"))
            token_ids += [token_id for token_id in ids_of_bytes if token_id is not None]
        return tuple(token_ids)

    def _ids_of(self, spelled: str) -> tuple[int, ...]:
        with suppress(Exception):  # whatever the library raises where its model lacks a token
            return tuple(token.id for token in self.backend.model.tokenize(spelled))
        return ()

    def _id_of_byte(self, byte: int) -> int | None:
        token_id: int | None = self.backend.token_to_id(f"<0x{byte:02X}>")
        return token_id

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens in the middle of a sequence: it keeps a leading space, and names special tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, with the names of special tokens if `special`, else without them."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    @cache  # noqa: B019 - a process has one tokenizer or two
    def packed(self) -> bytes:
        """Return this tokenizer as bytes for `unpacked`, a compressed tokenizer.json. The first call may take 1 s."""
        return zlib.compress(self.to_json().encode())

    @classmethod
    def unpacked(cls, packed: bytes, eos_token_ids: frozenset[int]) -> Tokenizer:
        """Return the tokenizer that another process has sent, in the form of `packed`.

        Raises:
            IncompatibleDraftError: the bytes are not a tokenizer, or too long.
        """
        try:
            text = zlib.decompressobj().decompress(packed, MAX_TOKENIZER_BYTES)
            return cls(PlainTokenizer(Backend.from_str(text.decode()), None), eos_token_ids)
        except Exception as exc:  # whatever broken bytes make the libraries raise
            raise IncompatibleDraftError(f"the target's tokenizer cannot be read ({exc})") from exc

    def to_json(self) -> str:
        """Return this tokenizer as the text of a file tokenizer.json."""
        return str(self.backend.to_str())

    @property
    def backend(self) -> Backend:
        """Return the tokenizer of the library `tokenizers` that this one is built on."""
        backend: Backend = self._tokenizer.backend_tokenizer
        return backend

    def shown_markers(self, *, calls: bool) -> dict[int, str]:
        """Return those special tokens that have to appear in the text of a chat's answer, as names by token id.

        These are the markers of reasoning, and if `calls` also those of tool calls: whatever reads the reasoning or the
        calls from the text would not find them without their markers.
        """
        wanted = (*MARKERS, BEGIN, END) if calls else (BEGIN, END)
        found = {self.markers[each]: each for each in wanted if each in self.markers}
        return {token_id: marker for token_id, marker in found.items() if token_id in self.special_ids}

    def stream(self, shown: Mapping[int, str] = MappingProxyType({})) -> TextStream:
        """Return a decoder that turns a growing sequence of token ids into text, one token after another.

        Args:
            shown: by token id, texts to write in place of the tokens' own.
        """
        return TextStream(self, self.backend, shown)


class TextStream:
    """Decoder of a growing sequence of tokens, whose pieces of text add up to the text of the whole sequence.

    Args:
        backend: the tokenizer, as an object of the library `tokenizers`.
        shown: by token id, texts to write in place of the tokens' own.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Any, shown: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._shown = shown
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._silent: list[int] = []  # the latest tokens, as long as they have no text

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes: none for a special token, or in the middle of a character."""
        if token_id in self._shown:  # a new text begins after it
            piece = self.rest() + self._shown[token_id]
            self._stream, self._token_ids, self._pieces = DecodeStream(skip_special_tokens=True), [], []
            self._silent = []
            return piece
        self._token_ids.append(token_id)
        if token_id in self._tokenizer.special_ids:
            return ""
        self._silent.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._silent = []
        elif len(self._silent) >= MAX_SILENT_TOKENS:
            piece = self._given_up()
        self._pieces.append(piece)
        return piece

    def _given_up(self) -> str:
        """Return the text of the latest tokens, which have not completed a character for long; begin anew at the last.

        If the last token decoded alone has another text than after the tokens before it, return an empty text, and
        change nothing.
        """
        decode, (*tokens, last) = self._tokenizer.decode, self._silent
        if (text := decode(tokens)) + decode([last]) != decode(self._silent):
            return ""
        self._stream, self._silent = DecodeStream(skip_special_tokens=True), [last]
        return text + self._step(last)

    def rest(self) -> str:
        """Return, at the end of the sequence, the text of its last tokens, which have not completed a character."""
        text = self._tokenizer.decode(self._token_ids)
        streamed = "".join(self._pieces)
        return text.removeprefix(streamed) if text.startswith(streamed) else ""

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # bytes that are no UTF-8 changed the decoding of earlier ones: start again after them
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._backend, token_id) or ""


def _speakable(text: str) -> str:
    """Return the text of a prompt; raise InvalidRequestError if tools or calls put half of a surrogate pair into it."""
    check_unicode(text, "messages")
    return text


def plain_chat(chat: Chat) -> str:
    """Return the prompt of a conversation for a model without a chat template.

    It is the tools if there are any, then one paragraph "role: content" for each message, and at the end "assistant:".
    """
    tools = f"tools: {chat.tools_json}\n\n" if chat.tools() else ""
    return f"{tools}{''.join(map(_paragraph, chat.conversation()))}assistant:"


def _paragraph(message: Mapping[str, Any]) -> str:
    calls = "".join(map(HERMES.written, message.get("tool_calls", ())))
    return f"{message['role']}: {message['content']}{calls}\n\n"


def _characters_of_bytes() -> list[str]:
    """Return the character with which byte-level tokenizers spell each byte, as GPT-2 does.

    It is the byte's own character if that is printable, else one from number 256 on.
    """
    printable = {ord(character) for character in ByteLevel.alphabet() if ord(character) < 256}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_CHARACTERS = _characters_of_bytes()
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(_CHARACTERS)}


def _load(path: Path, *, whole: bool = False) -> Any:
    """Return the tokenizer of a model directory, without Transformers if possible.

    That is a `PlainTokenizer` if it does the same as Transformers' tokenizer. Otherwise, or if `whole`, Transformers
    makes the tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    CheckpointFiles(path).require_tokenizer()
    try:
        plain = None if whole else load_plain(path)
        return plain if plain is not None else _load_with_transformers(path)
    except Exception as exc:  # whatever a broken directory makes the libraries raise
        reason = " ".join(str(exc).split())[:MAX_REASON_CHARACTERS]
        if (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file():
            reason += "; tokenizer.model alone needs `pip install sentencepiece`, or a tokenizer.json beside it"
        raise ConfigError(f"model {path}: its tokenizer cannot be loaded ({reason})") from exc


def _load_with_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer of Transformers 5 goes by the model's family even where the directory names the generic class, so
    # that one tokenizer.json would mean different tokenizers beside a Llama target and a Qwen2 draft.
    loader = PreTrainedTokenizerFast if names_generic_class(path) else AutoTokenizer
    return loader.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Return a hash of a vocabulary, which maps tokens to ids.

    It is the first 16 hexadecimal digits of SHA-256 over lines of JSON, [id, token], in the order of ids.
    """
    lines = (json.dumps([token_id, token]) for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]))
    return _digest("\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def eos_token_ids(path: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Return a model's end-of-sequence ids: the tokenizer's, and those of generation_config.json or else config.json.

    Args:
        path: directory of the model.
        tokenizer_eos: end-of-sequence id of the tokenizer; None if it has none.
    """
    own = frozenset() if tokenizer_eos is None else frozenset([tokenizer_eos])
    return own | (CheckpointFiles(path).eos_token_ids or frozenset())
