"""Settings of prompts: where they come from, flags or a file with one per line, and parameters of their requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from specdec.inference.config import BUNDLED_PROMPTS, ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.request import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_NEW_TOKENS,
    RANGES,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from specdec.inference.settings import group, setting
from specdec.inference.text.unicode import check_unicode
from specdec.inference.workers.completion import CompletionRequest


@dataclass(frozen=True, slots=True)
class PromptJob:
    """Prompts to complete, with the settings of their requests and of the output.

    Attributes:
        prompts: texts.
        template: request to send for each prompt, with an empty prompt, which is then replaced.
        concurrency: prompts in flight at once.
        format: text: as it streams; tokens: a line per token, then the text; json: one object per prompt on stdout.
        observe: reports to write at the end.
        deadline_s: seconds that each prompt may take, retries included.
    """

    prompts: tuple[Any, ...]
    template: CompletionRequest
    concurrency: int
    format: str
    observe: ObserveConfig
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """Grammar of the output, by one flag at most.

    Attributes:
        json_schema: the output is JSON that fits this schema.
        regex: the output as a whole matches this expression.
        choice: the output is one of these texts; may be given several times.
        grammar: the output keeps to this grammar, in Lark or GBNF.
    """

    SECTION: ClassVar = "structured output (docs/structured.md)"

    json_schema: Path | None = setting(None, "--json_schema FILE", exclusive=True)
    regex: str | None = setting(None, "--regex REGEX", exclusive=True)
    choice: tuple[str, ...] | None = setting(None, "--choice TEXT", exclusive=True)
    grammar: Path | None = setting(None, "--grammar FILE", exclusive=True)

    def read(self) -> Grammar | None:
        """Return the grammar of the flag that is given; None if no flag is.

        Raises:
            ConfigError: a file cannot be read.
            InvalidRequestError: the grammar is empty or too long.
        """
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return Grammar(GrammarKind.CHOICE, json.dumps(self.choice))
        for kind, path in ((GrammarKind.JSON_SCHEMA, self.json_schema), (GrammarKind.GRAMMAR, self.grammar)):
            if path is not None:
                return Grammar(kind, text_of(path))
        return None


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Settings of prompts and of their requests.

    Attributes:
        prompt: one prompt; may be given several times.
        prompt_text: a UTF-8 file with one prompt per line.
        max_new_tokens: output tokens.
        format: text: with accepted draft tokens in green on a terminal; tokens: first a line per token with its number,
            id and origin; json: one object per prompt, a line each.
        stop: the output ends before this text; may be given several times.
        seed: key of the noise, 0 .. 2^64-1 (default: drawn at random).
    """

    SECTION: ClassVar = "prompts and output"

    prompt: tuple[str, ...] | None = setting(None, "--prompt TEXT", exclusive=True)
    prompt_text: Path = setting(BUNDLED_PROMPTS, "--prompt_text FILE", exclusive=True)
    max_new_tokens: int = setting(DEFAULT_MAX_NEW_TOKENS, "--max_new_tokens N", within=MAX_NEW_TOKENS)
    format: str = setting("text", "--format", choices=("text", "tokens", "json"))
    sampling: SamplingParams = group(SamplingParams, "sampling")
    stop: tuple[str, ...] = setting((), "--stop TEXT", section="sampling")
    seed: int | None = setting(None, "--seed N", section="sampling", within=RANGES["seed"])
    grammar: GrammarSettings = group(GrammarSettings)

    def job(
        self, *, concurrency: int, observe: ObserveConfig, gamma: int | None = None, deadline_s: float = math.inf
    ) -> PromptJob:
        """Return the prompts to complete, with the parameters of their requests; see `PromptJob`.

        Raises:
            ConfigError: a file cannot be read.
            InvalidRequestError: a value is outside its range.
        """
        prompts = tuple(read_prompts(self.prompt, self.prompt_text))
        sampling = replace(self.sampling, seed=self.seed or 0)
        GenerationRequest((0,), sampling, self.max_new_tokens, gamma=gamma)  # refuses now what is out of range
        template = CompletionRequest(
            prompt="",
            sampling=sampling,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            gamma=gamma,
            stop=self.stop,
            grammar=self.grammar.read(),
        )
        return PromptJob(prompts, template, concurrency, self.format, observe, deadline_s)


def read_prompts(prompts: Sequence[str] | None, file: Path) -> list[str]:
    """Return the prompts if they are given, else the lines of the file that are not blank.

    Raises:
        ConfigError: the file cannot be read as UTF-8, or has no prompt.
        InvalidRequestError: a prompt is not valid UTF-8.
    """
    for prompt in prompts or ():
        check_unicode(prompt, "prompt")
    if prompts is not None:
        return list(prompts)
    lines = text_of(file, "prompt file").split("\n")  # splitlines() would also split at U+2028 and others
    found = [line.removesuffix("\r") for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"prompt file {file} has no prompt: one per line is expected")
    return found


def text_of(path: Path, what: str = "grammar file") -> str:
    """Return the text of a UTF-8 file.

    Args:
        what: kind of the file, with which the message of an error begins.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{what} {path} cannot be read: {exc}") from exc
