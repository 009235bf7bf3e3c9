"""LLMPerf's chat client (ray-project/llmperf, src/llmperf/ray_clients) as servers notice it: body and parser."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {"Authorization": "Bearer secret"}


def body(prompt: str, max_tokens: int, *, model: str) -> dict[str, Any]:
    """A path as the model, an empty system message, and nothing of how to sample unless it was told."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
    return {"model": f"/models/{model}", "messages": messages, "stream": True, "max_tokens": max_tokens}


def reads(content: bytes) -> tuple[int, str]:
    """As it parses a stream: (events it counts as tokens, text). Of every line the first six bytes are cut off."""
    num_events, text = 0, ""
    for line in content.splitlines():
        if not (chunk := line.strip()):
            continue
        if (chunk := chunk[len("data: ") :]) == b"[DONE]":
            continue
        num_events += 1
        data = json.loads(chunk)
        assert "error" not in data
        text += data["choices"][0]["delta"].get("content") or ""
    return num_events, text
