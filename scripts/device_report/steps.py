"""Steps of a device's report before its servers: tests and benchmarks of this project, run one after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.config import ROOT
from specdec.inference.errors import ConfigError

TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Step:
    """A command of this project to run on the device, with a section in the report.

    Attributes:
        title: heading of the section.
        arguments: arguments of `python -m`.
        why_not: why the command cannot run here; "" if it can.
    """

    title: str
    arguments: tuple[str, ...]
    why_not: str = ""

    def run(self, output: Path) -> Done:
        """Run the command in the project's folder, and write its output to a log in `output`; return the result."""
        if self.why_not:
            return Done(self, True, f"Not run: {self.why_not}.")
        command = [sys.executable, "-m", *self.arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        text = done.stdout + done.stderr
        (output / f"{self.title.lower().replace(' ', '_')}.log").write_text(text, encoding="utf-8")
        shown = done.stdout if done.returncode == 0 else text
        lines = [line for line in shown.rstrip().splitlines() if not line.startswith('{"benchmark"')]  # is for programs
        return Done(self, done.returncode == 0, "\n".join(lines))


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a step: whether its command succeeded, and the output for the report, with errors if it failed."""

    step: Step
    passed: bool
    text: str

    def lines(self) -> Iterator[str]:
        """Yield the lines of the step's section in the report."""
        verdict = "" if self.passed else " (failed)"
        yield from (f"## {self.step.title}{verdict}", "", f"`python -m {' '.join(self.step.arguments)}`", "")
        yield from ("```", self.text, "```", "")


def cuda_steps(model: str) -> list[Step]:
    """Return the steps that check the torch backend on a GPU and measure its passes."""
    here, engines = ("--device=cuda", f"--model={model}"), "torch/float32,torch/bfloat16/never,torch/bfloat16"
    return [
        Step("Flips in bfloat16", ("benchmarks.flips", *here, f"--engines={engines}")),
        Step("Contract suite", ("pytest", "-q", "tests/unit/backends/pytorch/test_cuda.py")),
        Step("Price of exact text", ("benchmarks.exact", *here)),
        Step("Passes", ("benchmarks.device", *here)),
    ]


def neuron_steps(model: str) -> list[Step]:
    """Return the steps that measure passes on a device with TorchNeuron (docs/torchneuron.md)."""
    return [Step("Passes", ("benchmarks.device", "--device=neuron", f"--model={model}"))]


STEPS: dict[str, Callable[[str], Sequence[Step]]] = {"cuda": cuda_steps, "neuron": neuron_steps}
"""Functions from a target's directory to the steps of a device, by the device's name."""


def require_device(name: str) -> None:
    """Raise ConfigError unless this Python's torch can compute on the device ("cuda" or "neuron")."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        built = "a build with CUDA" if torch.version.cuda else "a build without CUDA"
        raise ConfigError(f"device cuda: torch {torch.__version__} ({built}) sees no GPU here, so nothing was measured")
    if name == "neuron":
        from specdec.inference.backends.devices import require_torch_neuron

        require_torch_neuron()
