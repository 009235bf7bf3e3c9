"""Training loop: optimizers, checkpoints, logging. A loss function defines the objective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import LlamaForCausalLM

from .architecture import logits_of
from .schedule import Schedule, Stage

MICRO_BATCH_TOKENS = 4096
LOG_EVERY = 10
CHECKPOINT = "checkpoint.pt"
Loss = Callable[[torch.Tensor], torch.Tensor]


class Sampler(Protocol):
    """Source of training rows."""

    def batch(self, step: int, stage: Stage) -> torch.Tensor:
        """Return rows int64 (stage.rows, stage.length + 1) of one step; a step always gives the same rows."""
        ...


@dataclass(frozen=True)
class Rates:
    """Peak learning rates: `matrix` for Muon on hidden matrices, `other` for AdamW on the rest."""

    matrix: float
    other: float


class Optimizers:
    """Optimizers stepped together: Muon for hidden matrices, AdamW for embeddings and norms."""

    def __init__(self, model: LlamaForCausalLM, rates: Rates) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._parameters = matrices + others
        muon = torch.optim.Muon(matrices, lr=rates.matrix, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, lr=rates.other, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._all: list[tuple[torch.optim.Optimizer, float]] = [(muon, rates.matrix), (adam, rates.other)]

    def step(self, factor: float) -> None:
        """Clip the gradient, step at `factor` times the peak rates, clear the gradient."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, rate in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, object]]:
        """Return the state for a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._all]

    def load(self, state: list[dict[str, object]]) -> None:
        """Restore `state`."""
        for (optimizer, _), part in zip(self._all, state, strict=True):
            optimizer.load_state_dict(part)


def next_token_loss(model: LlamaForCausalLM) -> Loss:
    """Return a loss: mean cross-entropy in nats per token of rows int64 (rows, length + 1)."""

    def loss(rows: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, rows[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    return loss


def load_checkpoint(model: LlamaForCausalLM, directory: Path) -> None:
    """Load only the weights of the newest checkpoint in `directory` into `model`."""
    model.load_state_dict(torch.load(directory / CHECKPOINT, weights_only=True)["model"])


@dataclass
class Run:
    """Resumable training run that keeps its checkpoint and control file in `directory`."""

    model: LlamaForCausalLM
    sampler: Sampler
    schedule: Schedule
    rates: Rates
    directory: Path
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.optimizers = Optimizers(self.model, self.rates)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        """Newest checkpoint of this run."""
        return self.directory / CHECKPOINT

    def _resume(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizers.load(saved["optimizers"])
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]

    def save(self) -> None:
        """Write model, optimizers and data position; a crash while writing leaves the old file."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def train(self, loss: Loss) -> None:
        """Train to the end of the schedule, logging progress and saving checkpoints."""
        self.model.train()
        with Progress(disable=not os.isatty(1)) as bar:
            task = bar.add_task(self.directory.name, total=self.schedule.steps)
            for value, rate in self._steps(loss):
                bar.update(task, completed=self.step, total=self.schedule.steps)
                if self.step % LOG_EVERY == 0:
                    bar.console.print(self._line(value, rate), highlight=False, soft_wrap=True)
                if self.step % self.checkpoint_every == 0:
                    self.save()
        self.save()

    def _line(self, value: float, rate: float) -> str:
        factor = self.schedule.factor(self.step - 1)
        return (
            f"{time.strftime('%H:%M:%S')} step {self.step}/{self.schedule.steps} tokens {self.tokens} "
            f"loss {value:.4f} factor {factor:.3f} tokens/s {rate:.0f}"
        )

    def _steps(self, loss: Loss) -> Iterator[tuple[float, float]]:
        """Yield (mean loss since the last log line, tokens per second) after every step."""
        values: list[float] = []
        while self.step < self.schedule.steps:
            self.schedule = self.schedule.reread(self.directory / "schedule.json")
            started = time.perf_counter()
            value, tokens = self._one_step(loss)
            seconds = time.perf_counter() - started
            values = [*values, value][-LOG_EVERY:]
            self.step, self.tokens, self.seconds = self.step + 1, self.tokens + tokens, self.seconds + seconds
            yield sum(values) / len(values), tokens / seconds

    def _one_step(self, loss: Loss) -> tuple[float, int]:
        stage = self.schedule.stage(self.step)
        batch = self.sampler.batch(self.step, stage)
        parts = torch.split(batch, max(1, MICRO_BATCH_TOKENS // (batch.shape[1] - 1)))
        total = 0.0
        for part in parts:
            value = loss(part) * (len(part) / len(batch))
            value.backward()  # type: ignore[no-untyped-call]
            total += value.item()
        self.optimizers.step(self.schedule.factor(self.step))
        return total, len(batch) * (batch.shape[1] - 1)
