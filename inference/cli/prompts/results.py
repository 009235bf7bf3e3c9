"""Result of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inference.commit import Delta, Event, Finished, FinishReason, Started, TokenLogprobs
from inference.errors import SpecDecError
from inference.observe.stats import RequestStats
from inference.workers.status import code_name


@dataclass(slots=True)
class Result:
    """Result of one completion, which grows with its events.

    Attributes:
        prompt: text; from a program also token ids, or a `Chat`.
        stats: its figures: times, tokens, acceptance.
        error: its failure; None if it has none.
    """

    prompt: Any
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: SpecDecError | None = None

    def record(self, event: Event) -> None:
        """Add an event that has just arrived."""
        self.stats.take(event)
        if isinstance(event, Started):
            self.seed = event.seed
        elif isinstance(event, Delta):
            self.text += event.text
            self.token_ids.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
        elif isinstance(event, Finished):
            self.finish_reason = event.reason

    def to_json(self) -> dict[str, Any]:
        """Return the object that --format json prints; times are in seconds."""
        stats = self.stats
        fields: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "seed": self.seed,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_cached_tokens": stats.num_cached_tokens,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "timings": {"ttft_s": stats.ttft_s, "tpot_s": stats.tpot_s, "end_to_end_s": stats.end_to_end_s},
        }
        if self.error is not None:
            fields["error"] = {"code": code_name(self.error), "message": str(self.error)}
        return fields
