"""Prompts and parameters of the library's calls: their types for users, and the requests that are made of them.

Calls read names and types off `CompletionRequest` and `SamplingParams`. The typed dictionaries here repeat them for
type checkers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, get_args, get_type_hints

from specdec.inference.declared import did_you_mean
from specdec.inference.errors import ConfigError, InvalidRequestError, cut
from specdec.inference.request import SamplingParams, Schedule, SeedScope
from specdec.inference.text.chat import Chat
from specdec.inference.text.structured import KINDS, only_grammar
from specdec.inference.workers.completion import CompletionRequest

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Prompt as a program gives it: a text, token ids, or the messages of a chat with "role" and "content"."""
PROMPT_KINDS = "a text, a list of token ids, or a list of messages with role and content"
_OURS = {"prompt", "sampling", "unsaid", "resume", "deadline", "grammar"}
_SAMPLING = {each.name: each for each in fields(SamplingParams) if each.name not in ("seed", "noise")}
_REQUEST = {each.name: each for each in fields(CompletionRequest) if each.name not in _OURS}
_HINTS = {**get_type_hints(SamplingParams), **get_type_hints(CompletionRequest)}
_PLAIN: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}


class Parameters(TypedDict, total=False):
    """Keyword parameters of the library's calls `generate`, `stream` and `compare`, for type checkers.

    `CompletionRequest` and `SamplingParams` say what each means.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    seed_scope: SeedScope
    max_new_tokens: int | None
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Collection[int]
    structured_outputs: Mapping[str, Any] | None
    gamma: int | None
    schedule: Schedule | None
    logprobs: int | None
    prompt_logprobs: int | None
    min_new_tokens: int
    echo: bool
    ids_only: bool
    cache_salt: str
    draft_session: str
    include_rejected: bool
    adapter: str
    prediction: str


class ModelSettings(TypedDict, total=False):
    """Keyword settings of `LLM`, for type checkers, with the names of flags; None stands for the flag's default."""

    revision: str | None
    draft_revision: str | None
    backend: str | None
    device: str | None
    dtype: str | None
    exact: str | None
    sequence_length: int | None
    beyond_positions: bool | None
    batch: int | None
    threads: int | None
    prefix_caching: bool | None
    gamma: int | None
    adaptive_gamma: bool | None
    min_vocabulary_share: float | None
    compile: str | None
    emulate: str | None
    tp_degree: int | None
    draft_tp_degree: int | None
    speculation_method: str | None
    neuron_config: Mapping[str, Any] | None
    neuron_cores: str | None
    compiled_model_path: str | Path | None
    device_sampling: bool | None


class ClientSettings(TypedDict, total=False):
    """Keyword settings of `Client`, for type checkers, with the names of flags; None stands for the flag's default."""

    port: int | None
    batch: int | None
    connect_timeout_s: float | None
    deadline_s: float | None
    reconnect_timeout_s: float | None
    tls_ca: str | Path | None
    tls_client_cert: str | Path | None
    tls_client_key: str | Path | None
    tls_server_name: str | None
    token_file: str | Path | None
    insecure: bool | None


def prompt_list(prompts: Any) -> list[Prompt]:
    """Return the list of prompts that a program gives; one prompt gives a list of one.

    Raises:
        InvalidRequestError: the value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise _wrong("prompts", prompts, f"{PROMPT_KINDS}, or a list of such")
    is_one = len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping)
    return [prompts] if is_one else list(prompts)


def prompt_of(prompt: Any) -> str | tuple[int, ...] | Chat:
    """Return a prompt in the form that `CompletionRequest.prompt` takes: a text, a tuple of token ids, or a `Chat`.

    Raises:
        InvalidRequestError: the value has another type than a prompt.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _wrong("prompt", prompt, PROMPT_KINDS)
    if prompt and all(isinstance(each, Mapping) for each in prompt):
        return Chat.read(prompt)
    if not all(isinstance(each, Integral) for each in prompt):
        raise _wrong("prompt", prompt, PROMPT_KINDS)
    return tuple(map(int, prompt))


def request_of(parameters: Mapping[str, Any]) -> CompletionRequest:
    """Return the request that parameters, by name, describe; its prompt is empty.

    Raises:
        ConfigError: no parameter has such a name; the message has the one that was perhaps meant.
        InvalidRequestError: a value has another type, or is out of range.
    """
    names = {*_SAMPLING, *_REQUEST, "structured_outputs"}
    for name in parameters:
        if name not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"no parameter is called {name}{did_you_mean(name, names)}; there are {known}")
    values = {name: _read(name, value) for name, value in parameters.items()}
    sampling = SamplingParams(**{name: values.pop(name) for name in _SAMPLING.keys() & values.keys()})
    _, grammar = only_grammar({"structured_outputs": values.pop("structured_outputs", None)})
    return CompletionRequest("", sampling, grammar=grammar, **values)


def spelled_out(function: FunctionT) -> FunctionT:
    """Return the function, whose signature at run time lists each keyword parameter in place of `**parameters`.

    Names and types come from the typed dictionary that annotates `**parameters`. Notebooks show and complete them.
    """
    *own, others = (whole := inspect.signature(function)).parameters.values()
    [kind] = get_args(get_type_hints(function)[others.name])
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
        for name, hint in get_type_hints(kind).items()
    ]
    function.__signature__ = whole.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function


def _read(name: str, value: Any) -> Any:
    """Convert a parameter's value to the type that requests hold it as, such as a tuple for a list.

    Raises:
        InvalidRequestError: the value has another type than the parameter.
    """
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        return tuple(_all(name, texts, str, "a text, or a list of texts"))
    if name == "stop_token_ids":
        return frozenset(map(int, _all(name, value, Integral, "a list of token ids")))
    if name == "logit_bias":
        expected = "token ids with their biases, such as {5: -1.0}"
        pairs = value.items() if isinstance(value, Mapping) else value
        _all(name, [number for pair in _all(name, pairs, tuple, expected) for number in pair], Real, expected)
        return tuple((int(token_id), float(bias)) for token_id, bias in pairs)
    if name == "structured_outputs":
        return _structured(name, value)
    for kind, (base, text) in _PLAIN.items():
        if kind is _HINTS[name] or kind in get_args(_HINTS[name]):
            if value is None and _HINTS[name] is not kind:
                return None
            if not isinstance(value, base) or isinstance(value, bool) != (kind is bool):
                raise _wrong(name, value, text)
            return kind(value)
    return value


def _structured(name: str, value: Any) -> Any:
    """Return `structured_outputs` unchanged if it is None, or has a value of the right type in just one field.

    Fields are named by the kind of grammar, such as regex.

    Raises:
        InvalidRequestError: no field or several have a value, a field is unknown, or its value is of another type.
    """
    kinds = [*KINDS, "json_object"]
    given = {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    if value is None or (len(given) == 1 and kinds.count(key := next(iter(given)))):
        texts = (str,) if value is None or key in ("regex", "grammar") else (str, Mapping, Sequence, bool)
        if value is None or isinstance(given[key], texts):
            return value
        raise _wrong(f"{name} {key}", given[key], "a text")
    for key in given.keys() - set(kinds):
        raise InvalidRequestError(
            f"{name} has no {key}{did_you_mean(key, kinds)}; there are {', '.join(kinds)}", field=name
        )
    raise _wrong(name, value, f"one of {', '.join(kinds)}, as in {{'regex': '[0-9]+'}}")


def _all(name: str, values: Any, base: type, expected: str) -> Any:
    is_list = not isinstance(values, str | bytes | Mapping) and hasattr(values, "__iter__")
    if not is_list or not all(isinstance(each, base) and not isinstance(each, bool) for each in values):
        raise _wrong(name, values, expected)
    return values


def _wrong(name: str, value: Any, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {cut(repr(value), 60)} is not valid: {expected} is expected", field=name)
