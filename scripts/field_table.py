"""Generator of the table of foreign fields in docs/foreign_fields.md: `python -m scripts.field_table`.

Owns the names of the fields that vLLM and llama-server take; the gateway's schema defines what becomes of each.
"""

from __future__ import annotations

import json
from pathlib import Path

from inference.gateway.bodies.schema import ChatBody, CompletionBody, GenerationBody

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "foreign_fields.md"
BEGIN, END = "<!-- fields: made by `python -m scripts.field_table` -->\n", "<!-- end of fields -->\n"
NO_EFFECT = "Taken, without effect"
BODIES: dict[str, type[GenerationBody]] = {"completions": CompletionBody, "chat": ChatBody}

_VLLM_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words echo add_special_tokens response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval
"""
_VLLM_COMPLETIONS = "prompt suffix prompt_embeds"
_VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
_LLAMA = """
    verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress sse_ping_interval
    n_predict max_completion_tokens max_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_predict_ms
    response_fields id_slot top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p temperature
    dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty presence_penalty
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau
    mirostat_eta adaptive_target adaptive_decay seed n_probs logprobs min_keep backend_sampling
    post_sampling_probs lora json_schema grammar grammar_lazy grammar_triggers preserved_tokens chat_format
    reasoning_format reasoning_control reasoning_budget_tokens reasoning_budget_start_tag
    reasoning_budget_end_tags reasoning_budget_message generation_prompt parse_tool_calls chat_parser
    continue_final_message echo logit_bias ignore_eos stop samplers
"""
VLLM = {"completions": (_VLLM_BOTH + _VLLM_COMPLETIONS).split(), "chat": (_VLLM_BOTH + _VLLM_CHAT).split()}
"""Fields of vLLM's completion and chat protocols of 2026."""
LLAMA = {
    "completions": [*_LLAMA.split(), "model", "prompt"],
    "chat": [*_LLAMA.split(), *["model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"]],
}
"""Fields of llama-server's completion schema of 2026."""


def table() -> str:
    """Return Markdown with one row per field, and what each endpoint does with it."""
    names = sorted({name for server in (VLLM, LLAMA) for fields in server.values() for name in fields})
    rows = [
        f"| `{name}` | {', '.join(_servers(name))} | {_cell(name, 'completions')} | {_cell(name, 'chat')} |"
        for name in names
    ]
    return "\n".join(["| field | of | completions | chat |", "|---|---|---|---|", *rows]) + "\n"


def _servers(name: str) -> list[str]:
    servers = {"vLLM": VLLM, "llama-server": LLAMA}
    return [server for server, fields in servers.items() if any(name in each for each in fields.values())]


def _cell(name: str, endpoint: str) -> str:
    if not any(name in server[endpoint] for server in (VLLM, LLAMA)):
        return ""
    body = BODIES[endpoint]
    if body.no_ops.get(name):
        return "no-op: " + ", ".join(f"`{json.dumps(value)}`" for value in body.no_ops[name])
    if name not in body.model_fields:
        return "refused"
    return "no-op" if (body.model_fields[name].description or "").startswith(NO_EFFECT) else "**served**"


def updated(document: str) -> str:
    """Return the document with the current table."""
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
