"""Request body and stream parser of LLMPerf's chat client, copied from its sources (ray-project/llmperf)."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {"Authorization": "Bearer secret"}


def body(prompt: str, max_tokens: int, *, model: str) -> dict[str, Any]:
    """Return the body of a chat request as LLMPerf sends it, with an empty system message."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
    return {"model": f"/models/{model}", "messages": messages, "stream": True, "max_tokens": max_tokens}


def reads(content: bytes) -> tuple[int, int, str]:
    """Parse a streamed answer as LLMPerf does; return the number of events, of events with text, and the whole text.

    LLMPerf counts every event as a token, but its time to the first token ends at the first event with text. It cuts
    six bytes, "data: ", off every line without checking them.
    """
    num_events, num_timed, text = 0, 0, ""
    for line in content.splitlines():
        if not (chunk := line.strip()):
            continue
        if (chunk := chunk[len("data: ") :]) == b"[DONE]":
            continue
        num_events += 1
        data = json.loads(chunk)
        assert "error" not in data
        if piece := data["choices"][0]["delta"].get("content"):
            num_timed += 1
            text += piece
    return num_events, num_timed, text
