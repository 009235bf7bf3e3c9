"""What is to be completed: prompts, from a flag or from a file with one per line, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from inference.config import ObserveConfig
from inference.errors import ConfigError
from inference.text.unicode import check_unicode
from inference.workers.completion import CompletionRequest


@dataclass(frozen=True, slots=True)
class PromptJob:
    """Prompts to complete.

    Attributes:
        template: the request of each prompt, but for the prompt.
        concurrency: prompts in flight at once.
        as_json: one object per prompt on stdout; else text as it streams.
        observe: what to write at the end.
        deadline_s: seconds that each may take, with all that it is asked again.
    """

    prompts: tuple[str, ...]
    template: CompletionRequest
    concurrency: int
    as_json: bool
    observe: ObserveConfig
    deadline_s: float = math.inf


def read_prompts(prompt: str | None, file: Path) -> list[str]:
    """The prompt itself, or every line of the file that is not blank.

    Raises:
        ConfigError: the file cannot be read as UTF-8, or has no prompt.
        InvalidRequestError: the prompt itself is no UTF-8.
    """
    if prompt is not None:
        check_unicode(prompt, "prompt")
        return [prompt]
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also split at U+2028 and others
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"prompt file {file} cannot be read: {exc}") from exc
    prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"prompt file {file} has no prompt: one per line is expected")
    return prompts
