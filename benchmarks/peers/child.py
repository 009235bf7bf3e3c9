"""Process of one program that is measured; it reads prompts from standard input and times the program's answers.

A line is a JSON object. The first one is the `Setup`, and its answer lists variants and versions. Every other one names
a variant, the prompts as lists of token ids, and the number of tokens, and its answer has seconds and tokens.
This module imports only the standard library, since it runs in the environment of each peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Generate = Callable[[Sequence[list[int]], int], Sequence[Sequence[int]]]
"""Function from prompts, all at once, and a number of tokens to the greedy tokens of each prompt, in order."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Models that a program shall load.

    Attributes:
        target, draft: directories of checkpoints with one vocabulary.
        dtype: "float32", or "int8" for the program's own way to compute with weights of 8 bits.
        folder: directory for the models as the program wants them; they are made at the first use.
        num_streams: most prompts at once.
        length: most positions of a prompt and its answer together.
        variants: names of the variants to prepare; if empty, all that the program usually has.
        num_servers: servers at once that share this machine's devices.
    """

    target: str
    draft: str
    dtype: str
    folder: str
    num_streams: int
    length: int
    variants: Sequence[str] = ()
    num_servers: int = 1

    def converted(self, name: str, convert: Callable[[str, Path], object]) -> Path:
        """Return the path of "target" or "draft" in the program's own format; make it unless an earlier run did."""
        path = Path(self.folder) / self.dtype / name
        if not path.exists():
            half = path.with_name(f"{path.name}.part")
            half.parent.mkdir(parents=True, exist_ok=True)
            convert(self.target if name.startswith("target") else self.draft, half)
            half.rename(path)
        return path


@dataclass(frozen=True, slots=True)
class Loaded:
    """Program that is compared, with its models.

    Attributes:
        variants: its functions that generate, by name; "plain" is among them.
        versions: versions of the program and its libraries, by name.
        before: functions to call before a variant generates, by name; if one returns True, the variant's next answer is
            a warm-up, and is not measured.
    """

    variants: Mapping[str, Generate]
    versions: Mapping[str, str]
    before: Mapping[str, Callable[[], bool]] = field(default_factory=dict)


def answer(load: Callable[[Setup], Loaded]) -> None:
    """Load the model that the first line names, then answer every further line until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there
    loaded = load(Setup(**json.loads(sys.stdin.readline())))
    _reply(replies, {"variants": list(loaded.variants), "versions": dict(loaded.versions)})
    for line in sys.stdin:
        asked = json.loads(line)
        name, rest = asked["variant"], (asked["prompts"], asked["num_tokens"])
        if name in loaded.before and loaded.before[name]():
            _timed(loaded.variants[name], *rest)
        _reply(replies, _timed(loaded.variants[name], *rest))


def _timed(generate: Generate, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        token_ids = generate(prompts, num_tokens)
    except Exception as error:  # a variant that fails is named in the report; the others go on
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - started, "token_ids": [list(each) for each in token_ids]}


def _reply(replies: Any, content: Mapping[str, Any]) -> None:
    print(json.dumps(content), file=replies, flush=True)
