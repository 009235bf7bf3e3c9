"""Answers of /v1/completions and /v1/chat/completions, whole and in chunks, as dictionaries ready for JSON."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from specdec.inference.commit import FinishReason, TokenLogprob, TokenLogprobs
from specdec.inference.gateway.answers.documents import encoded
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.answers.parts import Choice, Part
from specdec.inference.gateway.answers.stream import AnswerStream
from specdec.inference.gateway.bodies.schema import GenerationBody
from specdec.inference.text.calls.reader import CallPiece


class ChunkFormat(AnswerStream):
    """Format of answers that stream as chunks, each with "choices"; an unstreamed answer has much the same fields.

    Attributes:
        answer_id: end of the answer's "id", behind a prefix such as "chatcmpl-".
        prompt_ids: token ids of each choice's prompt, if the request asks for token ids; else empty.
    """

    per_token = False

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self.answer_id = secrets.token_hex(12)
        self.created = int(time.time())
        self.prompt_ids: Sequence[Sequence[int]] = ()
        self._begun: set[int] = set()

    def expect(self, body: GenerationBody, *, num_choices: int, per_token: bool) -> None:
        """Prepare for the answer to a request with this body.

        Args:
            num_choices: number of choices of all prompts of the request together.
            per_token: True to stream an event per token, False to stream one per pass of the target model.
        """
        self.answer_id = body.request_id or self.answer_id
        self.choices = [Choice(shows_prompt=self.shows_prompt) for _ in range(num_choices)]
        self.per_token = body.stream and per_token
        self._n, self._options = body.n, body.stream_options
        head = encoded(self.head(chunk=True)).removesuffix("}")
        self._opening = f'data: {head},"choices":['  # the same for every chunk, so it is written once

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.answer_id}", "object": kind, "created": self.created, "model": self._model}

    def _ids(self, index: int, part: Part) -> dict[str, Any]:
        """Return the fields for token ids of an entry of "choices"; only a choice's first entry has the prompt's ids.

        Return an empty dictionary unless the request asks for token ids.
        """
        if not self.prompt_ids:
            return {}
        first = {} if index in self._begun else {"prompt_token_ids": self.prompt_ids[index]}
        self._begun.add(index)
        return {"token_ids": part.token_ids, **first}

    @abstractmethod
    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return all fields but "choices", of a whole answer or, with `chunk`, of a chunk."""

    @abstractmethod
    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """Return one entry of a chunk's "choices": that of the choice number `index`, with a part of its text."""

    def choice(self, index: int, whole: Part, choice: Choice) -> dict[str, Any]:
        """Return one entry of a whole answer's "choices"; `whole` has all parts of the choice as one."""
        return self.chunk(index, whole, choice)

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the whole answer, if it is not streamed."""
        entries = [self.choice(index, choice.whole(), choice) for index, choice in enumerate(self.choices)]
        beside = {name: ids for entry in entries for name, ids in of_chat(entry).items()}
        return {**self.head(chunk=False), "choices": entries, **beside, **figures(self.choices, n=self._n)}

    def _part(self, index: int, part: Part, choice: Choice) -> bytes:
        beside: dict[str, Any] = {}
        if self._options.include_usage:  # as in OpenAI's API, all chunks but the last, which has it, say null
            beside["usage"] = usage(self.choices, n=self._n) if self._options.continuous_usage_stats else None
        if self._options.include_speculation:
            beside["speculation"] = speculation(part)
        entry = self.chunk(index, part, choice)
        return self._event(encoded(entry), beside | of_chat(entry))

    def _end(self) -> bytes:
        return self._event("", figures(self.choices, n=self._n)) if self._options.include_usage else b""

    def _failure(self, error: ApiError) -> bytes:
        return f"data: {encoded(error.body())}\n\n".encode()

    def _event(self, choice: str, beside: dict[str, Any]) -> bytes:
        tail = "," + encoded(beside).removeprefix("{") if beside else "}"
        return f"{self._opening}{choice}]{tail}\n\n".encode()


class CompletionFormat(ChunkFormat):
    """Format of the answers of /v1/completions, streamed or not."""

    shows_prompt = True

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return all fields but "choices", of a whole answer or, with `chunk`, of a chunk."""
        return self._head("cmpl", "text_completion")

    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """Return one entry of a chunk's "choices": that of the choice number `index`, with a part of its text."""
        offset, first = choice.num_characters, part.is_prompt
        logprobs = text_logprobs(part.logprobs, offset, begins_prompt=first) if part.logprobs else None
        choice.num_characters += sum(position.num_characters for position in part.logprobs)
        return {
            "index": index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": _reason(part),
            **self._ids(index, part),
        }


class ChatFormat(ChunkFormat):
    """Format of the answers of /v1/chat/completions. A choice's first chunk has the role and the first token.

    Args:
        reader: function that takes the prompt's text and returns a reader, which splits the answer into reasoning,
            content and tool calls; the function returns None if the answer can only be content.
    """

    def __init__(self, model: str, reader: Callable[[str], MessageReader | None]) -> None:
        super().__init__(model)
        self._reader = reader
        self._readers: dict[int, MessageReader | None] = {}

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return all fields but "choices", of a whole answer or, with `chunk`, of a chunk."""
        return self._head("chatcmpl", "chat.completion.chunk" if chunk else "chat.completion")

    def chunk(self, index: int, part: Part, choice: Choice) -> dict[str, Any]:
        """Return one entry of a chunk's "choices": that of the choice number `index`, with a part of its message."""
        role = {} if index in self._readers else {"role": "assistant"}
        fields, reason = self._read(index, part, choice)
        logprobs = chat_logprobs(part.logprobs) if part.logprobs else None
        calls = [{"index": number, **call} for number, call in fields.pop("tool_calls", {}).items()]
        delta = {**role, **fields, **({"tool_calls": calls} if calls else {})}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **self._ids(index, part)}

    def choice(self, index: int, whole: Part, choice: Choice) -> dict[str, Any]:
        """Return one entry of a whole answer's "choices", with its message; `whole` has all parts as one."""
        entry = self.chunk(index, whole, choice)
        delta = entry.pop("delta")
        for call in delta.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if "tool_calls" in delta else "", "refusal": None, **delta}
        return {"index": index, "message": message, **entry}

    def _read(self, index: int, part: Part, choice: Choice) -> tuple[dict[str, Any], str | None]:
        """Return the message's fields that a part of the text adds, and the finish reason if it is the last part."""
        if index not in self._readers:
            self._readers[index] = self._reader(choice.prompt_text)
        reader, reason = self._readers[index], _reason(part)
        if reader is None:
            return {"content": part.text}, reason
        reading = reader.push(part.text, is_last=reason is not None, is_cut=reason == FinishReason.LENGTH.value)
        fields: dict[str, Any] = {"reasoning_content": reading.reasoning} if reading.reasoning else {}
        if reading.calls:
            fields["tool_calls"] = {number: _call(piece) for number, piece in reading.calls.items()}
        if reading.content:  # some clients would show an empty one beside the calls
            fields["content"] = reading.content
        return fields, "tool_calls" if reader.has_calls and reason == FinishReason.STOP.value else reason


def of_chat(entry: dict[str, Any]) -> dict[str, Any]:
    """Take the prompt's token ids out of a chat's entry of "choices", and return them as a field of the document.

    In vLLM's chat answers this field stands beside "choices". An entry without such ids, or of /v1/completions, stays
    as it is, and the result is an empty dictionary.
    """
    is_chat = "prompt_token_ids" in entry and "text" not in entry
    return {"prompt_token_ids": entry.pop("prompt_token_ids")} if is_chat else {}


def _call(piece: CallPiece) -> dict[str, Any]:
    """Return the entry of "tool_calls" for a piece of a call; the first piece of each call has its id and name."""
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    head = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return {**head, "function": {"name": piece.name, "arguments": piece.arguments}}


def _reason(part: Part) -> str | None:
    return part.finish_reason.value if part.finish_reason else None


def figures(choices: Sequence[Choice], *, n: int) -> dict[str, Any]:
    """Return the field "usage" and, if `metrics` returns it, "metrics"; each prompt of the request has `n` choices."""
    return {"usage": usage(choices, n=n), **metrics(choices)}


def usage(choices: Sequence[Choice], *, n: int) -> dict[str, Any]:
    """Return the value of "usage" for a whole request, whose prompts have `n` choices each, one prompt after another.

    Its numbers of tokens count every prompt once, and the output of every choice.
    """
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in choices[::n])
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    num_accepted = sum(choice.num_predicted_accepted for choice in choices)
    num_verified = sum(choice.num_predicted_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_verified - num_accepted,
        },
    }


def speculation(part: Part) -> dict[str, Any]:
    """Return the value of a chunk's "speculation": which tokens are accepted draft tokens, and how many were drafted.

    The last chunk of a target pass also has the text of the rejected draft tokens, and the times of the pass.
    """
    fields = {"accepted": part.accepted, "num_draft_tokens": part.num_draft_tokens, "token_ids": part.token_ids}
    if part.timings is None:
        return fields
    return {**fields, "rejected": part.rejected_text, "timings": asdict(part.timings)}


def metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return statistics of the draft tokens, named as in vLLM (its PR 48915).

    "acceptance_histogram" has at index j the number of passes that accepted exactly j draft tokens. "num_spec_tokens"
    is the greatest number of draft tokens in a pass. "held" is the number of passes for which drafting was off, by the
    setting `--drafting never` or because it was slower. If there were neither draft tokens nor such passes, the
    dictionary is empty.
    """
    passes = sum((choice.drafted for choice in choices), Counter[tuple[int, int]]())
    num_held = sum(choice.num_held for choice in choices)
    if not passes:
        return {"metrics": {"speculative_decoding": {"held": num_held}}} if num_held else {}
    num_passes = passes.total()
    num_draft_tokens = sum(drafted * times for (drafted, _), times in passes.items())
    num_accepted_tokens = sum(accepted * times for (_, accepted), times in passes.items())
    longest = max(drafted for drafted, _ in passes)
    histogram = [0] * (longest + 1)
    for (_, accepted), times in passes.items():
        histogram[accepted] += times
    summary = {
        "mean_acceptance_length": 1 + num_accepted_tokens / num_passes,
        "draft_acceptance_rate": num_accepted_tokens / num_draft_tokens,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_passes,
        "num_accepted_draft_tokens": num_accepted_tokens,
        "num_draft_tokens": num_draft_tokens,
        "num_spec_tokens": longest,
        **({"held": num_held} if num_held else {}),
    }
    return {"metrics": {"speculative_decoding": summary}}


def text_logprobs(positions: Sequence[TokenLogprobs], offset: int, *, begins_prompt: bool = False) -> dict[str, Any]:
    """Return log-probabilities in the form of /v1/completions: parallel lists with an entry per position.

    Args:
        offset: number of characters in the text before the first position.
        begins_prompt: True if the first position is the prompt's first token, whose values become null: it follows no
            other token.
    """
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += position.num_characters
    named = [[(_name(token), token.logprob) for token in position] for position in positions]
    tokens = [name for (name, _), *_ in named]
    chosen: list[float | None] = [logprob for (_, logprob), *_ in named]
    top: list[dict[str, float] | None] = [dict((*best, first)) for first, *best in named]
    if begins_prompt:
        chosen[0], top[0] = None, None
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return log-probabilities in the form of /v1/chat/completions: one object per token."""
    entries = [list(map(_entry, position)) for position in positions]
    content = [{**chosen, "top_logprobs": top} for chosen, *top in entries]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _name(token), "logprob": token.logprob, "bytes": list(token.text)}


def _name(token: TokenLogprob) -> str:
    """Return a token's text; if its bytes are only a part of a character, their hexadecimal numbers, as OpenAI does."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)
