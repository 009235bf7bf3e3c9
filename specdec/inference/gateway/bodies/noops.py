"""Request fields of other servers that have no effect here, and the values with which each is accepted.

Clients and frameworks send such fields by themselves. With the values listed here, the answer is what the field asks
for anyway; with any other value it would not be, so the request is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic_core import PydanticCustomError

from specdec.inference.errors import cut

NoOps: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Table from a field's name to the values with which it is accepted; if there are none, only null is accepted."""
UNSUPPORTED = "unsupported"
"""Type of the Pydantic error for a field that is refused."""
MAX_SHOWN_CHARACTERS = 40


def _each(names: str, *values: Any) -> NoOps:
    return dict.fromkeys(names.split(), values)


BOTH: NoOps = {
    **_each("store use_beam_search early_stopping include_stop_str_in_output watermarking", False),
    **_each("return_tokens_as_token_ids return_token_offsets return_tokens", False),
    **_each("verbose timings_per_token return_progress post_sampling_probs", False),
    **_each("detokenize skip_special_tokens parse_tool_calls", True),
    **_each("spaces_between_special_tokens return_mm_kwargs cache_prompt backend_sampling", True, False),
    **_each("priority routed_experts_prompt_start n_cache_reuse n_indent n_discard xtc_probability", 0),
    **_each("dynatemp_range dry_multiplier mirostat n_probs min_keep", 0),
    **_each("n_keep t_max_predict_ms", 0, -1),
    **_each("best_of length_penalty stream_interval typical_p repeat_penalty", 1),
    **_each("thinking_token_budget id_slot sse_ping_interval top_n_sigma repeat_last_n adaptive_target", -1),
    **_each("reasoning_budget_tokens", -1),
    **_each("bad_words response_fields lora", []),
    **_each("vllm_xargs", {}),
    **_each("grammar", ""),
    **_each("allowed_token_ids prompt_logprobs truncate_prompt_tokens"),
    **_each("service_tier", "auto", "default"),
    **_each("reasoning_format", "auto", "deepseek"),
}
COMPLETION: NoOps = {**BOTH, **_each("suffix", ""), **_each("add_special_tokens", True)}
TOKENIZE: NoOps = _each("return_token_strs", False)
CHAT: NoOps = {
    **BOTH,
    **_each("echo add_special_tokens return_prompt_text", False),
    **_each("include_reasoning", True),
    **_each("functions documents", []),
    **_each("mm_processor_kwargs media_io_kwargs", {}),
    **_each("modalities", ["text"]),
    **_each("function_call", "none", "auto"),
    **_each("verbosity", "medium"),
    **_each("web_search_options think"),
}
RESPONSES: NoOps = {
    **BOTH,
    **_each("background return_token_ids", False),
    **_each("n", 1),
    **_each("truncation", "disabled"),
    **_each("prompt_cache_retention", "in_memory", "24h"),
    **_each("previous_response_id conversation prompt max_tokens max_completion_tokens response_format request_id"),
}
MESSAGES: NoOps = {**_each("n", 1), **_each("return_token_ids", False), **_each("mcp_servers thread compaction")}
TEXT_CONFIG: NoOps = _each("verbosity", "medium")
REASONING_CONFIG: NoOps = {
    **_each("effort", "medium"),
    **_each("summary generate_summary", "auto", "concise", "detailed"),
}
STREAM_OPTIONS: NoOps = _each("include_obfuscation", True, False)
MESSAGE: NoOps = _each("function_call")
TOOL: NoOps = _each("strict", False)

_STATELESS = "answers are not stored here; send the whole conversation as input"
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice, and tool_calls in messages",
    "strict": "it is a field of the function in the tool",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "store": _STATELESS,
    "thread": "conversations are not stored here; send the whole one as messages",
    "mcp_servers": "offer their tools as tools, and call them yourself",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "allowed_token_ids": "a structured output keeps to what may be said, logit_bias -100 leaves out a token",
    "bad_words": "logit_bias -100 leaves out a token",
    "detokenize": "the text is made anyway; return_token_ids adds the ids",
    "echo": "the request has the messages; /v1/completions has echo",
    "include_stop_str_in_output": "the text ends before the stop string; append it where finish_reason is stop",
    "prompt_logprobs": "/v1/completions gives them with echo and logprobs",
    "skip_special_tokens": "/detokenize shows special tokens, of the ids that return_token_ids gives",
    "truncate_prompt_tokens": "cut the ids of /tokenize, and send them as the prompt",
    "web_search_options": "no server here searches: offer a search of your own among tools",
    "think": 'templates that know it take chat_template_kwargs: {"enable_thinking": false}',
}


def without_no_ops(values: Mapping[str, Any], no_ops: NoOps) -> dict[str, Any]:
    """Return a body's fields, without those that are null, and without the fields of `no_ops`, which have no effect.

    Raises:
        PydanticCustomError: a field of `no_ops` has a value with which it is not accepted.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in given.keys() & no_ops.keys():
        value = given.pop(name)
        if not any(_equal(value, each) for each in no_ops[name]):
            raise _refusal(name, value, no_ops[name])
    return given


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON: 1.0 is 1, but false is not 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _refusal(name: str, value: Any, values: tuple[Any, ...]) -> PydanticCustomError:
    """Return the error for a field with a value outside the accepted `values`; its first word is the field's name."""
    taken = f", only {' or '.join(map(json.dumps, values))}, which changes nothing" if values else ""
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    message = f"{name} {cut(json.dumps(value), MAX_SHOWN_CHARACTERS)} is not supported here{taken}{hint}"
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


def schema_of(no_ops: NoOps) -> dict[str, Any]:
    """Return JSON schemas of the fields of `no_ops`, which have no effect: each lists the accepted values and null."""
    note = "Accepted without effect: this is so anyway."
    return {name: {"enum": [*values, None], "description": note} for name, values in no_ops.items()}
