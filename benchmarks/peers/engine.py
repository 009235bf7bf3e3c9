"""Programs to compare, this project's own among them, and the processes that run them (by `child.answer`)."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from benchmarks.peers.child import Setup
from benchmarks.peers.environment import UnavailableError, last_line, python_of
from specdec.inference.config import ROOT

LOAD_S = 3600.0
"""Limit in seconds of a program's start; the first one may build llama.cpp, and convert models."""
ANSWER_S = 600.0
END_S = 20.0
OURS = "specdec"


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to compare.

    Attributes:
        module: name of the module in this package that its process runs.
        dtypes: dtypes in which it can compute.
        environment: name of its file in requirements/; "" if it runs in this project's own environment.
        most_streams: most prompts at once that all of its variants accept.
        copies: number of copies of the target's weights that its process has in memory.
    """

    name: str
    module: str
    dtypes: tuple[str, ...] = ("float32", "int8")
    environment: str = ""
    most_streams: int = 1024
    copies: int = 1

    def python(self) -> str:
        return str(python_of(self.environment)) if self.environment else sys.executable


PEERS = (
    Peer(OURS, "ours"),
    Peer("Transformers", "transformers_generate", dtypes=("float32",), most_streams=1),
    Peer("OpenVINO GenAI", "openvino", environment="openvino", copies=3),
    Peer("llama.cpp", "llama"),
)
OVER_VLLM = (Peer(OURS, "over_vllm", ("float32", "bfloat16")), Peer("vLLM", "vllm", ("float32", "bfloat16")))
"""This project's target with vLLM as its engine, and vLLM itself, both in vLLM's environment."""
BESIDE_VLLM = (replace(OVER_VLLM[0], module="beside_vllm"), OVER_VLLM[1])
"""vLLM's server with this project's configuration file and a pool of draft workers, and vLLM's server without them."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Answers of one variant to prompts that it got at once, and the seconds until all were there."""

    seconds: float
    token_ids: list[list[int]]


class Engine:
    """Process of one program, with its models loaded.

    Raises:
        UnavailableError: the program cannot be installed, or its models cannot be loaded.
    """

    def __init__(self, peer: Peer, setup: Setup) -> None:
        self.peer = peer
        command = [peer.python(), "-m", f"benchmarks.peers.{peer.module}"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process, in `close`
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        try:
            loaded = self._ask(asdict(setup), LOAD_S)
        except BaseException:
            self.close()
            raise
        self.variants: list[str] = loaded["variants"]
        self.versions: dict[str, str] = loaded["versions"]

    def generate(self, variant: str, prompts: Sequence[list[int]], num_tokens: int) -> Timed:
        """Send prompts to a variant at once; return its answers, each of `num_tokens` tokens, and their time.

        Raises:
            UnavailableError: the program failed, or returned another number of tokens.
        """
        asked = {"variant": variant, "prompts": list(prompts), "num_tokens": num_tokens}
        found = self._ask(asked, ANSWER_S)
        if "error" in found:
            raise UnavailableError(found["error"])
        lengths = {len(each) for each in found["token_ids"]}
        if lengths != {num_tokens}:
            raise UnavailableError(f"answers have {sorted(lengths)} tokens instead of {num_tokens}")
        return Timed(found["seconds"], found["token_ids"])

    def close(self) -> None:
        """End the process by closing its input; kill it if it does not end in time."""
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, content: dict[str, Any], seconds: float) -> Any:
        """Send the process a line of JSON; return the JSON of the line that it answers within `seconds`.

        Raises:
            UnavailableError: the process has ended, or does not answer in time.
        """
        asking, answering = self._pipes
        try:
            print(json.dumps(content), file=asking, flush=True)
        except BrokenPipeError:
            raise UnavailableError(self._complaint()) from None
        ready, _, _ = select.select([answering], [], [], seconds)
        if not ready:
            self._process.kill()
            raise UnavailableError(f"no answer within {seconds:g} s")
        if not (line := answering.readline()):
            raise UnavailableError(self._complaint())
        return json.loads(line)

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        asking, answering = self._process.stdin, self._process.stdout
        if asking is None or answering is None:
            raise RuntimeError("the process was started without pipes")
        return asking, answering

    def _complaint(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return last_line(self._errors.read())
