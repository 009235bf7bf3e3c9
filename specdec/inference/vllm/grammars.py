"""Grammars in vLLM's cores: this project's own for its backend `guidance`, and those of resumed requests."""

from __future__ import annotations

from typing import Any

HOOKS = {
    "vllm.v1.structured_output.request:StructuredOutputRequest": "grammar _grammar",
    "vllm.v1.structured_output:StructuredOutputManager": "executor",
}
"""Names of vLLM: attributes that this module reads or sets."""
OWN_FORM = "specdec "
"""Beginning of a grammar in llguidance's own form, in the field in which vLLM expects Lark or GBNF."""


def take_own_grammars() -> None:
    """Let this process of vLLM take grammars in llguidance's own form, marked by `OWN_FORM`, beside those it knows."""
    from vllm.v1.structured_output import backend_guidance
    from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar as serialize

    def serialized(kind: Any, text: Any, *others: Any) -> str:
        is_own = isinstance(text, str) and text.startswith(OWN_FORM)
        own: str = text.removeprefix(OWN_FORM) if is_own else serialize(kind, text, *others)
        return own

    backend_guidance.serialize_guidance_grammar = serialized


def feed_grammar(manager: Any, request: Any, output_start: int) -> None:
    """Let the grammar of a resumed request, once it is compiled, read the output before the resume.

    Args:
        manager: vLLM's `StructuredOutputManager`.
        request: vLLM's `Request`, whose prompt ends with that output.
        output_start: position in the prompt at which the output begins.
    """
    asked, token_ids = request.structured_output_request, request.prompt_token_ids[output_start:]
    compiled = asked._grammar

    def fed() -> Any:
        grammar = compiled.result()
        if not grammar.accept_tokens(request.request_id, token_ids):
            raise ValueError("the grammar refuses the output before the resume")
        return grammar

    asked.grammar = manager.executor.submit(fed)
