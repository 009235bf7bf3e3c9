"""Measured figures of an exported pair: held-out loss, greedy acceptance, step-time ratio."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from .acceptance import Acceptance, greedy_texts, measure
from .architecture import parameter_count
from .export import load_model
from .tokenizer import BOS_ID, load_tokenizer
from .tokens import KINDS, Tokens, read_stream

ROW_TOKENS, LOSS_ROWS = 512, 32
PROMPTS_PER_KIND, NEW_TOKENS, GAMMA = 48, 128, 4


@dataclass(frozen=True)
class Pair:
    """Pair of models and their common tokenizer."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: Tokenizer


def held_out_loss(model: LlamaForCausalLM, stream: Tokens) -> tuple[float, int]:
    """Return mean nats per token over evenly spaced rows of `stream`, and the number of tokens scored."""
    count = min(LOSS_ROWS, (len(stream) - 1) // ROW_TOKENS)
    starts = [index * (len(stream) - ROW_TOKENS) // max(1, count - 1) for index in range(count)]
    total = 0.0
    for start in starts:
        row = torch.tensor([[BOS_ID, *stream[start : start + ROW_TOKENS].tolist()]])
        with torch.inference_mode():
            logits = model(input_ids=row[:, :-1]).logits[0].float()
        total += functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    return total / (count * ROW_TOKENS), count * ROW_TOKENS


def bytes_per_token(tokenizer: Tokenizer, stream: Tokens) -> float:
    """Return UTF-8 bytes of text per token of `stream`, special tokens counted as tokens without bytes."""
    text: str = tokenizer.decode(stream.tolist(), skip_special_tokens=True)
    return len(text.encode()) / len(stream)


def one_line_prompts(tokenizer: Tokenizer, documents: list[str], kind: str) -> list[list[int]]:
    """Return evenly chosen held-out documents, each cut to one line of at most 24 tokens, bos included."""
    chosen = documents[:: max(1, len(documents) // PROMPTS_PER_KIND)][:PROMPTS_PER_KIND]
    limit = 24 if kind != "prose" else 20
    prompts = [tokenizer.encode(document.split("\n")[0]).ids[:limit] for document in chosen]
    return [prompt for prompt in prompts if len(prompt) > 2]


def file_prompts(tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    """Return the prompts of a file, one per line, bos included."""
    return [tokenizer.encode(line).ids for line in path.read_text(encoding="utf-8").splitlines()]


def step_seconds(model: LlamaForCausalLM, context: int = 64, steps: int = 60) -> float:
    """Return median seconds of a one-token forward pass with `context` tokens in the KV cache, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples: list[float] = []
    with torch.inference_mode():
        cache = model(input_ids=torch.full((1, context), 5), use_cache=True).past_key_values
        for _ in range(steps):
            started = time.perf_counter()
            cache = model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True).past_key_values
            samples.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return statistics.median(samples)


def acceptance(pair: Pair, prompts: list[list[int]]) -> dict[str, float]:
    """Return the greedy acceptance of `prompts`, all rounds pooled."""
    texts = greedy_texts(pair.target, prompts, NEW_TOKENS)
    total = sum(measure(pair.draft, prompts, texts, GAMMA), Acceptance(0, 0, 0))
    return {"prompts": len(prompts), "rate": total.rate, "tokens_per_round": total.tokens_per_round}


def losses(pair: Pair, streams: Path) -> dict[str, dict[str, float]]:
    """Return the held-out loss of both models per kind, in nats per token and bits per byte."""
    result: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        stream = read_stream(streams, kind, "held_out")
        density = bytes_per_token(pair.tokenizer, stream)
        figures: dict[str, float] = {}
        for name, model in (("target", pair.target), ("draft", pair.draft)):
            nats, scored = held_out_loss(model, stream)
            figures |= {f"{name}_nats": nats, f"{name}_bits_per_byte": nats / math.log(2) / density}
            figures["tokens"] = scored
        result[kind] = figures
    return result


def sizes(pair: Pair) -> dict[str, float]:
    """Return parameters and step times of both models."""
    target, draft = step_seconds(pair.target), step_seconds(pair.draft)
    return {
        "target_parameters": parameter_count(pair.target),
        "draft_parameters": parameter_count(pair.draft),
        "target_step_ms": 1e3 * target,
        "draft_step_ms": 1e3 * draft,
        "step_ratio": draft / target,
    }


def evaluate(models: Path, held_out: dict[str, list[str]], streams: Path, prompts: Path) -> None:
    """Measure the pair under `models` and print a table, then one JSON line."""
    tokenizer = load_tokenizer(models / "target")
    pair = Pair(load_model(models / "target"), load_model(models / "draft"), tokenizer)
    rates = {kind: acceptance(pair, one_line_prompts(tokenizer, held_out[kind], kind)) for kind in KINDS}
    for path in sorted(prompts.glob("*.txt")):
        rates[path.name] = acceptance(pair, file_prompts(tokenizer, path))
    report: dict[str, object] = {"gamma": GAMMA, "new_tokens": NEW_TOKENS, "sizes": sizes(pair)}
    loss = losses(pair, streams)
    _print_table(loss, rates)
    print(json.dumps(report | {"loss": loss, "acceptance": rates}))


def _print_table(loss: dict[str, dict[str, float]], rates: dict[str, dict[str, float]]) -> None:
    table = Table("text", "target nats", "draft nats", "target bits/byte", "draft bits/byte", "accepted", "per round")
    columns = ("target_nats", "draft_nats", "target_bits_per_byte", "draft_bits_per_byte")
    for name, rate in rates.items():
        figures = [f"{loss[name][column]:.3f}" if name in loss else "" for column in columns]
        table.add_row(name, *figures, f"{rate['rate']:.3f}", f"{rate['tokens_per_round']:.2f}")
    Console(width=110).print(table)
