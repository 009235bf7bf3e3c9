"""llama.cpp's server: without a draft, with a draft model, and with lookup of n-grams; each variant has its own server.

Prompts go to `/completion` as token ids, and answers return as such, so llama.cpp's tokenizer has no part in it.
Answers are not streamed. The times include HTTP's, 1 or 2 ms an answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers import llama_build
from benchmarks.peers.child import Loaded, Setup, answer
from benchmarks.peers.server import Server, at_once
from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port

FOLDER = ROOT / "build" / "peers" / "llamacpp"
LENGTHS = (4, 8, 16)
CONFIDENCE = 0.5
LOOKUP = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"]
START_S = 120.0
TYPES = {"float32": "f32", "int8": "f16"}
"""llama.cpp's types for cached keys and values, by the dtype of the comparison; float16 is its default."""


def load(setup: Setup) -> Loaded:
    """Start llama.cpp's server for each variant, and wait until all are ready; return the variants."""
    sys.path.insert(0, str(llama_build.gguf_package(FOLDER)))
    program = llama_build.built_server(FOLDER)
    target, draft = (_gguf(setup, name) for name in ("target", "draft"))
    drafted = ["--spec-type", "draft-simple", "-md", str(draft), "-td", "1", "-ngld", "0"]
    kept = TYPES[setup.dtype]
    drafted += ["--spec-draft-type-k", kept, "--spec-draft-type-v", kept]
    methods = {
        "plain": [],
        **{f"draft {length}": [*drafted, "--spec-draft-n-max", str(length)] for length in LENGTHS},
        "draft by confidence": [*drafted, "--spec-draft-n-max", "16", "--spec-draft-p-min", str(CONFIDENCE)],
        "prompt lookup": LOOKUP,
    }
    servers = {name: _started([str(program), *_flags(setup, target), *flags]) for name, flags in methods.items()}
    for server in servers.values():
        server.wait(partial(server.answers, "/health"), START_S)
    variants = {name: partial(_generate, server) for name, server in servers.items()}
    return Loaded(variants, {"llama.cpp": llama_build.version(FOLDER)})


def _gguf(setup: Setup, name: str) -> Path:
    from benchmarks.peers.llama_gguf import write_gguf  # finds the package in the sources

    return setup.converted(f"{name}.gguf", partial(write_gguf, dtype=setup.dtype))


def _flags(setup: Setup, target: Path) -> list[str]:
    positions = setup.num_streams * setup.length
    kept = TYPES[setup.dtype]
    return [
        *("-m", str(target), "-t", "1", "-tb", "1", "-c", str(positions), "-np", str(setup.num_streams)),
        *("--cache-type-k", kept, "--cache-type-v", kept, "--cache-ram", "0", "--no-webui", "-fit", "off"),
    ]


def _started(command: Sequence[str]) -> Server:
    return Server([*command, "--port", str(port := free_port())], port)


def _generate(server: Server, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    def one(prompt: list[int]) -> list[int]:
        greedy = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
        asked = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "cache_prompt": False}
        answer = b"".join(server.lines("POST", "/completion", {**asked, **greedy, "return_tokens": True}))
        tokens: list[int] = json.loads(answer)["tokens"]
        return tokens

    return at_once(one, prompts)


if __name__ == "__main__":
    answer(load)
