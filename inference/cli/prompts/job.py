"""What the roles that complete prompts and end are asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from inference.config import ObserveConfig
from inference.workers.completion import CompletionRequest


@dataclass(frozen=True, slots=True)
class PromptJob:
    """Prompts to complete.

    Attributes:
        template: the request of each prompt, but for the prompt.
        concurrency: prompts in flight at once.
        as_json: one object per prompt on stdout; else text as it streams.
        observe: what to write at the end.
    """

    prompts: tuple[str, ...]
    template: CompletionRequest
    concurrency: int
    as_json: bool
    observe: ObserveConfig
