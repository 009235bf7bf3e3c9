"""Values that say "off": fields of other servers that this one has not, as far as what they ask for is so anyway.

Clients and frameworks send such fields by themselves. Any other value would change the answer, so it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic_core import PydanticCustomError

NoOps: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By field, the values that change nothing; none where the field has no such value but deserves a word of its own."""
UNSUPPORTED = "unsupported"
"""What pydantic calls the fault."""
MAX_SHOWN_CHARACTERS = 40

BOTH: NoOps = {
    "best_of": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # there are none in the text
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "watermarking": (False,),
    "thinking_token_budget": (-1,),
    "stream_interval": (1,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True, False),  # of images, of which there are none
    "routed_experts_prompt_start": (0,),
    "vllm_xargs": ({},),
    "verbose": (False,),
    "timings_per_token": (False,),
    "cache_prompt": (True, False),  # the tokens are the same
    "n_cache_reuse": (0,),
    "id_slot": (-1,),
    "return_tokens": (False,),
    "return_progress": (False,),
    "sse_ping_interval": (-1,),
    "n_indent": (0,),
    "n_keep": (0, -1),  # a context is never shifted
    "n_discard": (0,),
    "t_max_predict_ms": (0, -1),
    "response_fields": ([],),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "dynatemp_range": (0,),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "adaptive_target": (-1,),
    "n_probs": (0,),
    "min_keep": (0,),
    "backend_sampling": (True, False),  # where tokens are chosen, not which
    "post_sampling_probs": (False,),
    "lora": ([],),
    "grammar": ("",),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_budget_tokens": (-1,),
    "parse_tool_calls": (True,),
}
COMPLETION: NoOps = {**BOTH, "suffix": ("",), "add_special_tokens": (True,)}
CHAT: NoOps = {
    **BOTH,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
}
TOKENIZE: NoOps = {
    "return_token_strs": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
MESSAGE: NoOps = {"annotations": ([],), "function_call": ()}

_HINTS = {"functions": "use tools", "function_call": "use tool_choice, and tool_calls in messages"}


def without_no_ops(values: Mapping[str, Any], no_ops: NoOps) -> dict[str, Any]:
    """What of a body says something: no nulls, and no values that change nothing.

    Raises:
        PydanticCustomError: a field has a value that would change something.
    """
    said = {name: value for name, value in values.items() if value is not None}
    for name in said.keys() & no_ops.keys():
        value = said.pop(name)
        if not any(_equal(value, each) for each in no_ops[name]):
            raise _refusal(name, value, no_ops[name])
    return said


def _equal(value: Any, other: Any) -> bool:
    """As JSON has it: 1.0 is 1, but false is not 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _refusal(name: str, value: Any, values: tuple[Any, ...]) -> PydanticCustomError:
    """The fault of a field; its first word is the field."""
    taken = f", only {' or '.join(map(json.dumps, values))}, which changes nothing" if values else ""
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    message = f"{name} {_shown(value)} is not supported here{taken}{hint}"
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def schema_of(no_ops: NoOps) -> dict[str, Any]:
    """The fields as properties of a JSON schema."""
    note = "Taken, without effect: this is so anyway."
    return {name: {"enum": [*values, None], "description": note} for name, values in no_ops.items()}
