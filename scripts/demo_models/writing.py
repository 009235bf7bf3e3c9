"""Owns the making of the distillation text: which prompts the target continues, and how many."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .generation import Request, generate, requests

ROW_TOKENS = 256
KIND_SHARES = {"prose": 0.40, "code": 0.25, "structured": 0.35}
GREEDY_SHARE = 0.75


@dataclass(frozen=True)
class WritingPlan:
    """How much the target writes: `rows` texts in batches of `batch`."""

    rows: int
    seed: int
    batch: int = 96


def write_texts(
    target: LlamaForCausalLM, tokenizer: Tokenizer, documents: dict[str, list[str]], plan: WritingPlan, path: Path
) -> None:
    """Save int64 (rows, ROW_TOKENS) at `path`; continues a file that is there already."""
    rng = random.Random(plan.seed)
    torch.manual_seed(plan.seed)
    done = list(torch.load(path, weights_only=True).split(plan.batch)) if path.exists() else []
    sources = {kind: requests(tokenizer, documents[kind], plan.batch + 64, rng, GREEDY_SHARE) for kind in KIND_SHARES}
    with Progress(disable=not os.isatty(1)) as bar:
        task = bar.add_task("texts", total=plan.rows, completed=len(done) * plan.batch)
        for _ in range(len(done), -(-plan.rows // plan.batch)):
            kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
            started = time.perf_counter()
            done.append(_one_batch(target, next(sources[kind]), plan.batch))
            rate = plan.batch * ROW_TOKENS / (time.perf_counter() - started)
            torch.save(torch.cat(done), path)
            bar.update(task, advance=plan.batch)
            bar.console.print(f"{len(done) * plan.batch}/{plan.rows} texts, {kind}, {rate:.0f} tokens/s")


def _one_batch(target: LlamaForCausalLM, request: Request, rows: int) -> torch.Tensor:
    request = Request(request.prompts[:rows], request.temperature)
    written = generate(target, request, ROW_TOKENS)
    missing = rows - len(written)
    return torch.cat([written, written[:missing]]) if missing else written
