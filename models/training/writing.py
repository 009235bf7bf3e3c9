"""Making of the distillation text: the choice and the number of prompts that the target continues."""

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

from .generation import Request, generate, prompts_of

ROW_TOKENS = 160
KIND_SHARES = {"prose": 0.40, "code": 0.25, "structured": 0.35}
GREEDY_SHARE = 0.8
PROMPT_TOKENS = (5, 6, 8, 10, 12, 16, 20, 24)


@dataclass(frozen=True)
class WritingPlan:
    """Amount of text that the target writes: `rows` texts in batches of `batch`."""

    rows: int
    seed: int
    batch: int = 96


def write_texts(
    target: LlamaForCausalLM, tokenizer: Tokenizer, documents: dict[str, list[str]], plan: WritingPlan, path: Path
) -> None:
    """Save int64 (rows, ROW_TOKENS) at `path`; continue a file that exists already."""
    done = list(torch.load(path, weights_only=True).split(plan.batch)) if path.exists() else []
    with Progress(disable=not os.isatty(1)) as bar:
        task = bar.add_task("texts", total=plan.rows, completed=len(done) * plan.batch)
        for index in range(len(done), -(-plan.rows // plan.batch)):
            started = time.perf_counter()
            torch.manual_seed(plan.seed + index)
            done.append(generate(target, _request(tokenizer, documents, plan, index), ROW_TOKENS))
            rate = plan.batch * ROW_TOKENS / (time.perf_counter() - started)
            torch.save(torch.cat(done), path)
            bar.update(task, advance=plan.batch)
            bar.console.print(f"{len(done) * plan.batch}/{plan.rows} texts, {rate:.0f} tokens/s")


def _request(tokenizer: Tokenizer, documents: dict[str, list[str]], plan: WritingPlan, index: int) -> Request:
    """Return batch `index` of the plan: prompts of one length from documents of all kinds, greedy or sampled."""
    rng = random.Random(plan.seed * 100_003 + index)
    length = rng.choice(PROMPT_TOKENS)
    prompts = []
    for kind, share in KIND_SHARES.items():
        wanted = round(share * plan.batch)
        prompts.append(prompts_of(tokenizer, rng.sample(documents[kind], 2 * wanted), length)[:wanted])
    greedy = rng.random() < GREEDY_SHARE
    rows = torch.cat(prompts)
    filled = torch.cat([rows, rows[: plan.batch - len(rows)]])
    return Request(filled[: plan.batch], 0.0 if greedy else rng.uniform(0.7, 1.0))
