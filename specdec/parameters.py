"""Prompts and parameters as a program gives them: their names, their types, and one clear line for what is wrong.

Names, defaults and types are those of the requests, so that a new parameter is known here too.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

from specdec.inference.cli.config_file import meant
from specdec.inference.cli.flags import add_group
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.request import Options, SamplingParams
from specdec.inference.text.chat import Chat
from specdec.inference.text.structured import KINDS, the_grammar
from specdec.inference.workers.completion import CompletionRequest

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat with "role" and "content"."""
PROMPT_KINDS = "a text, a list of token ids, or a list of messages with role and content"
_OURS = {"prompt", "sampling", "unsaid", "resume", "deadline", "grammar"}
_SAMPLING = {each.name: each for each in fields(SamplingParams) if each.name not in ("seed", "noise")}
_OPTIONS = {each.name for each in fields(Options)}
_FIELDS = sorted(fields(CompletionRequest), key=lambda each: each.name in _OPTIONS)  # seed and max_new_tokens first
_REQUEST = {each.name: each for each in _FIELDS if each.name not in _OURS}
_HINTS = {**get_type_hints(SamplingParams), **get_type_hints(CompletionRequest)}
_PLAIN: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}


def several(prompts: Any) -> list[Prompt]:
    """Return prompts as a list, also a single one.

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
    """Return a prompt as requests have it; raise InvalidRequestError for a value of another type."""
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
    """Return the request that parameters describe, without its prompt.

    Raises:
        ConfigError: no parameter has such a name; the message has the one that was perhaps meant.
        InvalidRequestError: a value has another type, or is out of range.
    """
    names = {*_SAMPLING, *_REQUEST, "structured_outputs"}
    for name in parameters:
        if name not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"no parameter is called {name}{meant(name, names)}; there are {known}")
    values = {name: _read(name, value) for name, value in parameters.items()}
    sampling = SamplingParams(**{name: values.pop(name) for name in _SAMPLING.keys() & values.keys()})
    _, grammar = the_grammar({"structured_outputs": values.pop("structured_outputs", None)})
    return CompletionRequest("", sampling, grammar=grammar, **values)


def with_parameters(function: FunctionT) -> FunctionT:
    """Show the names, types and defaults of all parameters in a function's signature, in place of `**parameters`."""
    whole = inspect.signature(function)
    own = [each for each in whole.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    theirs = [_shown(name, each) for name, each in {**_SAMPLING, **_REQUEST}.items()]
    theirs.append(_keyword("structured_outputs", None, "Mapping[str, Any] | None"))
    function.__signature__ = whole.replace(parameters=[*own, *theirs])  # type: ignore[attr-defined]
    return function


def with_settings(kind: type[Any], settings: type[Any]) -> None:
    """Show the names and defaults of settings in the signature of a class, in place of `**settings`."""
    own = inspect.signature(kind).parameters.values()
    first = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parser = argparse.ArgumentParser(add_help=False)
    add_group(parser, settings)
    flags = {action.option_strings[0].removeprefix("--"): action.default for action in parser._actions}
    models = ("target_model", "model", "draft_model", "target_host")
    theirs = [_keyword(name, default, None) for name, default in flags.items() if name not in models]
    kind.__signature__ = inspect.Signature([*first, *theirs])


def _shown(name: str, each: Any) -> inspect.Parameter:
    default = () if each.default is MISSING else each.default
    written = {"stop": "str | Sequence[str]", "stop_token_ids": "Sequence[int]", "logit_bias": "Mapping[int, float]"}
    return _keyword(name, {} if name == "logit_bias" else default, written.get(name, each.type))


def _keyword(name: str, default: Any, annotation: str | None) -> inspect.Parameter:
    shown = inspect.Parameter.empty if annotation is None else annotation
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)


def _read(name: str, value: Any) -> Any:
    """Return a parameter's value as requests have it; raise InvalidRequestError for a value of another type."""
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
    """Return `structured_outputs` after a check that exactly one field, such as regex, has a value of its type.

    Raises:
        InvalidRequestError: there is no such field or more than one, or its value is of another type.
    """
    kinds = [*KINDS, "json_object"]
    given = {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    if value is None or (len(given) == 1 and kinds.count(key := next(iter(given)))):
        texts = (str,) if value is None or key in ("regex", "grammar") else (str, Mapping, Sequence, bool)
        if value is None or isinstance(given[key], texts):
            return value
        raise _wrong(f"{name} {key}", given[key], "a text")
    for key in given.keys() - set(kinds):
        raise InvalidRequestError(f"{name} has no {key}{meant(key, kinds)}; there are {', '.join(kinds)}", field=name)
    raise _wrong(name, value, f"one of {', '.join(kinds)}, as in {{'regex': '[0-9]+'}}")


def _all(name: str, values: Any, base: type, expected: str) -> Any:
    is_list = not isinstance(values, str | bytes | Mapping) and hasattr(values, "__iter__")
    if not is_list or not all(isinstance(each, base) and not isinstance(each, bool) for each in values):
        raise _wrong(name, values, expected)
    return values


def _wrong(name: str, value: Any, expected: str) -> InvalidRequestError:
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
    return InvalidRequestError(f"{name} {shown} is no value: {expected} is expected", field=name)
