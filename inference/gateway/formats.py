"""The two answers' shapes: text completion and chat completion, whole and in chunks. Dictionaries, ready for JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from inference.commit import TokenLogprob, TokenLogprobs
from inference.gateway.choice import Choice, Part


class Format(Protocol):
    """One endpoint's shape."""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """What stands beside "choices"."""

    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """One entry of a chunk's "choices"."""

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """One entry of a whole answer's "choices"."""


class _Base:
    def __init__(self, model: str) -> None:
        self._model = model
        self._id = secrets.token_hex(12)
        self._created = int(time.time())

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self._model}


class TextFormat(_Base):
    """Of /v1/completions."""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """See `Format`."""
        return self._head("cmpl", "text_completion")

    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """See `Format`."""
        offset, first = choice.num_characters, part.is_prompt
        logprobs = text_logprobs(part.logprobs, offset, begins_prompt=first) if part.logprobs else None
        choice.num_characters += sum(position.num_characters for position in part.logprobs)
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": _reason(part)}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """See `Format`."""
        begins = choice.has_scored_prompt
        logprobs = text_logprobs(choice.logprobs, 0, begins_prompt=begins) if choice.logprobs else None
        return {"index": index, "text": "".join(choice.texts), "logprobs": logprobs, "finish_reason": _reason(choice)}


class ChatFormat(_Base):
    """Of /v1/chat/completions. A choice's first chunk names the role, beside its first token."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._begun: set[int] = set()

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """See `Format`."""
        return self._head("chatcmpl", "chat.completion.chunk" if chunk else "chat.completion")

    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """See `Format`."""
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        logprobs = chat_logprobs(part.logprobs) if part.logprobs else None
        delta = {**role, "content": part.text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": _reason(part)}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """See `Format`."""
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        logprobs = chat_logprobs(choice.logprobs) if choice.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _reason(choice)}


def _reason(what: Part | Choice) -> str | None:
    return what.finish_reason.value if what.finish_reason else None


def usage(choices: Sequence[Choice], *, n: int) -> dict[str, Any]:
    """Tokens of a whole request: every prompt once, every choice's output."""
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in choices[::n])
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    num_accepted_tokens = sum(choice.num_accepted_tokens for choice in choices)
    num_draft_tokens = sum(choice.num_draft_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted_tokens,
            "rejected_prediction_tokens": num_draft_tokens - num_accepted_tokens,
        },
    }


def text_logprobs(positions: Sequence[TokenLogprobs], offset: int, *, begins_prompt: bool = False) -> dict[str, Any]:
    """The older shape: parallel lists; `offset` is where in the choice's text the first token begins.

    A prompt's first token follows nothing: it has nulls.
    """
    tokens = [_name(position.chosen) for position in positions]
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += position.num_characters
    chosen: list[float | None] = [position.chosen.logprob for position in positions]
    top: list[dict[str, float] | None] = [
        {_name(token): token.logprob for token in (*position.top, position.chosen)} for position in positions
    ]
    if begins_prompt:
        chosen[0], top[0] = None, None
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The newer shape: one object per token."""
    content = [{**_entry(position.chosen), "top_logprobs": list(map(_entry, position.top))} for position in positions]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _name(token), "logprob": token.logprob, "bytes": list(token.text)}


def _name(token: TokenLogprob) -> str:
    """The token's text; a part of a character as bytes:\\xe2, as OpenAI names it."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)
