"""Effect of an engine's arithmetic on the tokens: `python -m benchmarks.flips [--engines onnx/int8,torch/bfloat16]`.

Reads one text with every engine twice: part after part in passes over one token, and its parts beside each other in
passes over several, always after the text's own tokens. Flips are positions at which the two would choose different
tokens, greedy or sampled at temperature 1 with the same noise: the only way in which speculation can change an answer.
`bits` counts the positions with any other bit of logits. The rest compares with the first engine: perplexity, and the
positions where the choice is the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decoding import load_model
from benchmarks.report import print_json, print_table
from specdec.inference.config import BUNDLED_TARGET, ROOT
from specdec.inference.model.slots import Array, Backend, Span
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.text.tokenizer import Tokenizer

ENGINES = "onnx/float32,onnx/float32/always,onnx/int8,torch/float32,torch/bfloat16/never,torch/bfloat16"
SEQUENCE_LENGTH = 256
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=1)


@dataclass(frozen=True, slots=True)
class Reading:
    """Results of one engine that has read the whole text, either one token a pass or many.

    Attributes:
        greedy, sampled: ids of the tokens that it would choose after each token of the text, greedily and sampled.
        log_loss: mean negative log-probability of the text's next token.
        logits: float32 [num_tokens, vocab_size].
    """

    greedy: list[int]
    sampled: list[int]
    log_loss: float
    logits: Array


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    token_ids = list(Tokenizer.load(args.model).encode(args.text.read_text()))[: args.tokens]
    sequences = [token_ids[i : i + SEQUENCE_LENGTH] for i in range(0, len(token_ids), SEQUENCE_LENGTH)]
    readings = {name: _read_both(name, args, sequences) for name in args.engines.split(",")}
    _report(args, len(token_ids), readings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flips", description=__doc__)
    parser.add_argument(
        "--engines",
        default=ENGINES,
        help="BACKEND/DTYPE[/EXACT]; the first one is compared with (%(default)s)",
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="the model has not seen it (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text at most (%(default)s)")
    parser.add_argument("--width", type=int, default=8, help="of the wide passes (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="slots, and parts of the text in a pass (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--device", default="cpu", help="of the torch backend (%(default)s)")
    return parser


def _read_both(name: str, args: argparse.Namespace, sequences: Sequence[list[int]]) -> tuple[Reading, Reading]:
    """Read the text by the engine `name` (BACKEND/DTYPE or BACKEND/DTYPE/EXACT) in two ways; return both readings.

    The first way is passes over one token; the second is passes over `--width` tokens of each of several parts.
    """
    backend, dtype, *exact = name.split("/")
    device = args.device if backend == "torch" else "cpu"
    where = {"device": device, "threads": args.threads, "max_length": SEQUENCE_LENGTH, "num_slots": args.batch}
    model = load_model(args.model, backend=backend, dtype=dtype, exact=exact[0] if exact else "auto", **where)
    return _read(model, sequences, 1, 1), _read(model, sequences, args.width, args.batch)


def _read(model: Backend, sequences: Sequence[list[int]], width: int, num_beside: int) -> Reading:
    rows = np.concatenate(
        [
            row
            for first in range(0, len(sequences), num_beside)
            for row in _logits(model, sequences[first : first + num_beside], width)
        ]
    )  # [num_tokens, vocab_size]
    positions = [position for token_ids in sequences for position in range(len(token_ids))]
    greedy = choose_tokens(rows, [GREEDY] * len(rows), positions)
    sampled = choose_tokens(rows, [SAMPLED] * len(rows), positions)
    losses, end = [], 0
    for token_ids in sequences:
        losses += _losses(rows[end : end + len(token_ids) - 1], token_ids[1:])
        end += len(token_ids)
    return Reading(greedy, sampled, sum(losses) / len(losses), rows)


def _logits(model: Backend, sequences: Sequence[list[int]], width: int) -> list[Array]:
    """Read sequences beside each other, `width` tokens each a pass; return the logits of each, [length, vocab_size]."""
    parts: list[list[Array]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), width):
        read = [number for number, token_ids in enumerate(sequences) if len(token_ids) > start]
        ids = [sequences[number][start : start + width] for number in read]
        spans = [Span(slot, start, token_ids, len(token_ids)) for slot, token_ids in zip(read, ids, strict=True)]
        logits = model.forward(spans)
        host = logits.cpu().numpy() if isinstance(logits, torch.Tensor) else logits
        ends = np.cumsum([span.num_logits for span in spans])[:-1]
        for number, rows in zip(read, np.split(host, ends), strict=True):
            parts[number].append(rows)
    return [np.concatenate(each) for each in parts]


def _losses(logits: Array, next_ids: Sequence[int]) -> list[float]:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    normalizers = np.log(np.exp(scores).sum(axis=1))
    losses: list[float] = (normalizers - scores[np.arange(len(next_ids)), next_ids]).tolist()
    return losses


def _report(args: argparse.Namespace, num_tokens: int, readings: dict[str, tuple[Reading, Reading]]) -> None:
    reference, _ = next(iter(readings.values()))
    results = [{"engine": name, **_compare(*both, reference)} for name, both in readings.items()]
    header = [
        "",
        "greedy flips",
        "sampled flips",
        "bits",
        "largest logit difference",
        "perplexity",
        "same greedy choice",
        "same sampled choice",
    ]
    rows = [
        [
            result["engine"],
            str(result["greedy_flips"]),
            str(result["sampled_flips"]),
            str(result["other_bits"]),
            f"{result['largest_difference']:.1e}",
            f"{result['perplexity']:.3f}",
            f"{result['greedy_agreement']:.2%}",
            f"{result['sampled_agreement']:.2%}",
        ]
        for result in results
    ]
    title = f"{args.model.name}, {num_tokens} tokens of {args.text.name}, {args.batch} x {args.width} a pass against 1"
    print_table(title, header, rows)
    print_json("flips", {"tokens": num_tokens, "width": args.width, "engines": results})


def _compare(narrow: Reading, wide: Reading, reference: Reading) -> dict[str, Any]:
    return {
        "greedy_flips": _num_different(narrow.greedy, wide.greedy),
        "sampled_flips": _num_different(narrow.sampled, wide.sampled),
        "other_bits": int((narrow.logits != wide.logits).any(axis=1).sum()),
        "largest_difference": float(np.abs(narrow.logits - wide.logits).max()),
        "perplexity": math.exp(narrow.log_loss),
        "greedy_agreement": 1 - _num_different(narrow.greedy, reference.greedy) / len(reference.greedy),
        "sampled_agreement": 1 - _num_different(narrow.sampled, reference.sampled) / len(reference.sampled),
    }


def _num_different(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
