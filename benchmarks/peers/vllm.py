"""Stock vLLM's server over HTTP, in vLLM's environment: without a draft, at its defaults, and with its own drafts.

All variants but "defaults" and "asynchronous" run as vLLM's engine core does under this project's server: runner V1,
synchronous scheduling, no graphs. A variant that does not start is skipped, with the last line of its log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from benchmarks.peers.child import Generate, Loaded, Setup, answer
from benchmarks.peers.environment import UnavailableError
from benchmarks.peers.server import Server, at_once
from specdec.inference.serving.processes import free_port
from specdec.inference.vllm.options import prepare_environment

START_S = 900.0
POLLING_S = 1.1
BLOCK = 32
SPARE_BLOCKS = 16
ALIKE = ("--enforce-eager", "--no-async-scheduling")
"""Flags with which vLLM runs under this project's server; vLLM's own server gets them, too, for a fair comparison."""
EXTRA: Mapping[str, tuple[str, ...]] = {
    "asynchronous": ("--enforce-eager",),
    "graphs": ("--no-async-scheduling",),
    "tensor parallel 2": (*ALIKE, "--tensor-parallel-size", "2"),
    "fp8": (*ALIKE, "--quantization", "fp8"),
    "LoRA": (*ALIKE, "--enable-lora"),
}
"""Flags of further variants of vLLM, which `make vllm-gpu-report` compares, by the variant's name."""
IDS = {"return_token_ids": True}
"""Request fields by which vLLM's server returns token ids."""
LENGTHS = (4, 8)
USUAL = ("plain", "defaults", "ngram", "suffix", *(f"draft_model {length}" for length in LENGTHS))
"""Names of vLLM's variants in `make bench-vllm`."""


def ways(setup: Setup) -> dict[str, tuple[str, ...]]:
    """Return vLLM's flags for each variant, by the variant's name."""
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    draft = {"method": "draft_model", "model": setup.draft, "max_model_len": setup.length}
    methods = {
        "ngram": ngram,
        "suffix": {"method": "suffix", "num_speculative_tokens": 8},
        **{f"draft_model {length}": {**draft, "num_speculative_tokens": length} for length in LENGTHS},
    }
    speculating = {name: (*ALIKE, "--speculative-config", json.dumps(method)) for name, method in methods.items()}
    return {"plain": ALIKE, "defaults": (), **speculating, **EXTRA}


def load(setup: Setup) -> Loaded:
    """Start stock vLLM's server for each wanted variant, and wait for it; return the variants."""
    prepare(setup)
    chosen = {name: flags for name, flags in ways(setup).items() if name in (setup.variants or USUAL)}
    servers = {name: started(setup, flags, name) for name, flags in chosen.items()}
    variants = {name: usable(server, IDS) for name, server in servers.items()}
    return Loaded(variants, {}, dict.fromkeys(variants, rest))


def rest() -> bool:
    """Wait until vLLM's processes have stopped polling after the last request.

    Return False, which says that the next answer is no warm-up.
    """
    time.sleep(POLLING_S)
    return False


def usable(server: Server, shown: Mapping[str, object]) -> Generate:
    """Wait until a server is ready; return a function that generates on it.

    If the server did not start, the function raises UnavailableError.

    Args:
        shown: request fields by which the server returns token ids.
    """
    try:
        server.wait(partial(server.answers, "/v1/models"), START_S)
    except UnavailableError as error:
        return partial(refuse, str(error))
    return partial(generate, server, shown)


def refuse(reason: str, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Raise UnavailableError with `reason`; it is called instead of `generate` where a server did not start."""
    raise UnavailableError(reason)


def prepare(setup: Setup) -> None:
    """Set the environment variables of all servers: vLLM's runner V1, and on a CPU one thread and little memory.

    On a CPU, vLLM would also run its worker in a second process, for which its engine core would spin during each pass:
    of two CPU cores, none would be left for clients, gateways and draft workers. On a GPU the core runs the worker.
    """
    prepare_environment("info")
    if not torch.cuda.is_available():
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def engine_flags(setup: Setup) -> list[str]:
    """Return the flags of vLLM that all servers get, this project's and vLLM's own."""
    flags = ["--dtype", setup.dtype, "--max-model-len", str(setup.length), "--max-num-seqs", str(setup.num_streams)]
    if torch.cuda.is_available():
        memory = ["--gpu-memory-utilization", f"{0.9 / setup.num_servers:.2f}"]
    else:
        blocks = 2 * setup.num_streams * setup.length // BLOCK + SPARE_BLOCKS
        memory = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
    return [*flags, *memory, "--no-enable-prefix-caching"]


def started(setup: Setup, flags: Sequence[str], name: str) -> Server:
    """Start vLLM's own server for the variant `name`; vLLM chooses its runner itself if that begins with "defaults"."""
    environment = {**os.environ}
    if name.startswith("defaults"):
        environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    own = ["--model", setup.target, "--port", str(port := free_port()), "--generation-config", "vllm"]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return Server([*program, *own, *engine_flags(setup), *flags], port, environment)


def generate(
    server: Server, shown: Mapping[str, object], prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """Send all prompts at once, greedy and streamed; return the token ids of the answers in the same order."""

    def one(prompt: list[int]) -> list[int]:
        wanted = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
        token_ids: list[int] = []
        for line in server.lines("POST", "/v1/completions", {**wanted, **shown}):
            if line.startswith(b"data: {"):
                token_ids += ids_of(json.loads(line.removeprefix(b"data: ")))
        return token_ids

    return at_once(one, prompts)


def ids_of(chunk: dict[str, object]) -> list[int]:
    """Return the token ids in a chunk of a stream, from where vLLM's server or this project's puts them.

    Raises:
        UnavailableError: the chunk is an error.
    """
    match chunk:
        case {"error": error}:
            raise UnavailableError(str(error))
        case {"speculation": {"token_ids": list(ids)}} | {"choices": [{"token_ids": list(ids)}]}:
            return ids
    return []


if __name__ == "__main__":
    answer(load)
