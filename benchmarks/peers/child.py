"""Process of one program that is compared; it reads prompts from standard input, and times the program's answers.

Each line is a JSON object. The first one is the `Setup`, whose answer lists variants and versions. Every other one has
a variant, prompts as lists of token ids, and a number of tokens; its answer has the seconds and the new token ids. This
module imports only the standard library, since it runs in the environment of each program.
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
"""Function from prompts, to be answered at once, and a number of tokens to the greedy answers, in the same order."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Models that a measured program loads, and the number of prompts that it must answer at once.

    Attributes:
        target, draft: directories of the models' checkpoints, which have one vocabulary.
        dtype: "float32", "bfloat16", or "int8" for the program's own way to compute with weights of 8 bits.
        folder: directory for the models in the program's own format; they are made at the first use.
        num_streams: most prompts at once.
        length: most tokens of a prompt and its answer together.
        variants: names of the variants to prepare; if empty, all that the program usually has.
        num_servers: number of servers that share this machine's devices at the same time.
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
        """Return the path of the target or the draft in the program's own format; convert it if no earlier run did.

        `name` begins with "target" or "draft"; `convert` gets the directory of the checkpoint, and the path to write.
        """
        path = Path(self.folder) / self.dtype / name
        if not path.exists():
            half = path.with_name(f"{path.name}.part")
            half.parent.mkdir(parents=True, exist_ok=True)
            convert(self.target if name.startswith("target") else self.draft, half)
            half.rename(path)
        return path


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program that is compared, with its models loaded.

    Attributes:
        variants: functions that generate, by the variant's name; "plain" (no draft) is among them.
        versions: versions of the program and its libraries, by name.
        before: functions to call before a variant generates, by the variant's name; if one returns True, the variant
            answers twice, and only the second time is measured.
    """

    variants: Mapping[str, Generate]
    versions: Mapping[str, str]
    before: Mapping[str, Callable[[], bool]] = field(default_factory=dict)


def answer(load: Callable[[Setup], Loaded]) -> None:
    """Load the models of the `Setup` in the first line, then answer every further line until standard input ends."""
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
