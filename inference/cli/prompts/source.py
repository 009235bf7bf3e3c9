"""Where prompts come from: a flag, or a file with one prompt per line."""

from __future__ import annotations

from pathlib import Path

from inference.errors import ConfigError
from inference.text.unicode import check_unicode


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
