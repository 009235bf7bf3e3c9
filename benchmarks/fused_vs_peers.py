"""Our decoding against Transformers', greedy, same pair and prompts: `python -m benchmarks.fused_vs_peers [--quick]`.

No variant has a server in between. All decode the same number of tokens, never stopping early; they take turns, and the
best round of each counts. `bound` is the best speed-up that speculation could give with the acceptance and the times
measured here (Leviathan et al., arXiv 2211.17192, with a pass's real time for its width):

    speed-up <= mean_acceptance_length * pass(1) / (gamma * draft step + pass(gamma + 1))
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.decoding import GREEDY, decode, encode_all, load_model, read_prompts
from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved
from inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET, FUSED_GAMMA
from inference.model.proposer import Draft
from inference.model.slots import Backend, Span
from inference.scheduling.draft_length import DraftLength
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.speculation.speculative_decoder import SpeculativeDecoder

BASELINE = "transformers plain"


@dataclass(slots=True)
class Outcome:
    """Figures of one variant over all prompts in its best round."""

    seconds: float = float("inf")
    num_tokens: int = 0
    num_rounds: int = 0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_tokens / self.num_rounds if self.num_rounds else 1.0


Generate = Callable[[Sequence[int]], tuple[list[int], int]]
"""Function from a prompt to its output token ids and the number of target passes (0 if unknown)."""


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    lines = read_prompts(args.prompts, 2 if args.quick else args.num_prompts)
    prompts = encode_all(lines, args.target)
    num_tokens, rounds = (32, 1) if args.quick else (args.tokens, 3)
    pairs = {name: _load_pair(name, args) for name in args.backends.split(",")}
    variants = _peers(args, num_tokens)
    for name, (target, draft) in pairs.items():
        variants |= _ours(name, target, draft, args.gammas, num_tokens)
    outcomes = _race(variants, prompts, rounds)
    bounds = {name: _bound(target, draft, args.gammas, outcomes, name) for name, (target, draft) in pairs.items()}
    _report(args, outcomes, {variant: bound for by_variant in bounds.values() for variant, bound in by_variant.items()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_vs_peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts, one round")
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT)
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="one per line")
    parser.add_argument("--num_prompts", type=int, default=6, help="the file's first ones (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt (%(default)s)")
    parser.add_argument("--backends", default="torch,onnx", help="%(default)s")
    parser.add_argument("--gammas", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    return parser


def _load_pair(name: str, args: argparse.Namespace) -> tuple[Backend, Backend]:
    target, draft = (load_model(path, backend=name, threads=args.threads) for path in (args.target, args.draft))
    return target, draft


def _peers(args: argparse.Namespace, num_tokens: int) -> dict[str, Generate]:
    """Return Transformers' plain and assisted generation by name."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (args.target, args.draft)
    )

    def generate(prompt: Sequence[int], **options: Any) -> tuple[list[int], int]:
        inputs = torch.tensor([list(prompt)])
        output = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
            **options,
        )
        return output[0, len(prompt) :].tolist(), 0

    return {
        BASELINE: generate,
        "transformers assisted": lambda prompt: generate(prompt, assistant_model=draft),
    }


def _ours(name: str, target: Backend, draft: Backend, gammas: Sequence[int], num_tokens: int) -> dict[str, Generate]:
    """Return our target-only and fused decoding on one backend, by name."""
    variants: dict[str, Generate] = {
        f"{name} target-only": partial(decode, SlotDecoder(target), gamma=0, num_tokens=num_tokens)
    }
    for gamma in gammas:
        decoder = SpeculativeDecoder(SlotDecoder(target), ModelProposer(draft))
        variants[_fused(name, gamma)] = partial(decode, decoder, gamma=gamma, num_tokens=num_tokens)
    adaptive = SpeculativeDecoder(SlotDecoder(target), ModelProposer(draft), DraftLength())
    variants[f"{name} fused, as many as pay"] = partial(decode, adaptive, gamma=FUSED_GAMMA, num_tokens=num_tokens)
    return variants


def _fused(name: str, gamma: int) -> str:
    return f"{name} fused, gamma {gamma}"


def _race(variants: dict[str, Generate], prompts: Sequence[Sequence[int]], rounds: int) -> dict[str, Outcome]:
    outcomes = {name: Outcome() for name in variants}
    for generate in variants.values():
        generate(prompts[0])  # warm up
    for _ in range(rounds):
        for name, generate in variants.items():
            outcome = Outcome(seconds=0.0)
            for prompt in prompts:
                started = time.perf_counter()
                token_ids, num_passes = generate(prompt)
                outcome.seconds += time.perf_counter() - started
                outcome.num_tokens += len(token_ids)
                outcome.num_rounds += num_passes
                outcome.texts.append(token_ids)
            outcomes[name] = min(outcomes[name], outcome, key=lambda each: each.seconds)
    return outcomes


def _bound(
    target: Backend, draft: Backend, gammas: Sequence[int], outcomes: dict[str, Outcome], name: str
) -> dict[str, float]:
    """Return the largest speed-up over target-only that each gamma's acceptance allows."""
    past = list(range(3, 131))
    proposer = ModelProposer(draft)
    target.forward([Span(0, 0, past, 0)])

    def target_pass(width: int) -> object:
        return target.forward([Span(0, len(past), past[:width], width)])

    def draft_steps(gamma: int) -> None:
        chain = list(past)
        for _ in range(gamma):
            [tokens] = proposer.extend([Draft(0, chain, GREEDY, limit=1)])
            chain += [token.token_id for token in tokens or ()]

    draft_steps(1)
    variants: dict[str, Callable[[], object]] = {"1": partial(target_pass, 1)}
    for gamma in gammas:
        variants[f"pass {gamma}"] = partial(target_pass, gamma + 1)
        variants[f"steps {gamma}"] = partial(draft_steps, gamma)
    times = {key: taken.minimum for key, taken in interleaved(variants, rounds=8, seconds=8.0).items()}
    return {
        _fused(name, gamma): outcomes[_fused(name, gamma)].mean_acceptance_length
        * times["1"]
        / (times[f"pass {gamma}"] + times[f"steps {gamma}"])
        for gamma in gammas
    }


def _report(args: argparse.Namespace, outcomes: dict[str, Outcome], bounds: dict[str, float]) -> None:
    plain, assisted = outcomes[BASELINE], outcomes["transformers assisted"]
    rows, results = [], []
    for name, outcome in outcomes.items():
        own = outcomes.get(name.split(" ")[0] + " target-only")
        result = {
            "variant": name,
            "tokens_per_s": outcome.rate,
            "over_plain": outcome.rate / plain.rate,
            "over_assisted": outcome.rate / assisted.rate,
            "over_own_target_only": outcome.rate / own.rate if own else None,
            "bound": bounds.get(name),
            "mean_acceptance_length": outcome.mean_acceptance_length if outcome.num_rounds else None,
            "same_as_plain": _num_equal(outcome, plain),
        }
        results.append(result)
        figures = [value for key, value in result.items() if key not in ("variant", "same_as_plain")]
        cells = ["-" if value is None else f"{value:.2f}" for value in figures]
        rows.append([name, *cells, f"{result['same_as_plain']} of {len(plain.texts)}"])
    header = ["", "tokens/s", "/ plain", "/ assisted", "/ own target-only", "bound", "tokens per pass", "same text"]
    print_table(f"{len(plain.texts)} prompts, greedy, {args.threads} thread(s)", header, rows)
    print_json("fused_vs_peers", {"threads": args.threads, "variants": results})


def _num_equal(outcome: Outcome, other: Outcome) -> int:
    return sum(ours == theirs for ours, theirs in zip(outcome.texts, other.texts, strict=True))


if __name__ == "__main__":
    main()
