"""Comparison of passes that verify several paths of the draft tree with passes that verify the best path alone.

    python -m benchmarks.paths [--gamma 4] [--tokens 128]

Decoding is greedy and fused, without a network. In every round the draft makes a chain of gamma tokens; the further
paths leave it where the runner-up came closest, and go on to the same length. The tokens that each pass commits are
counted exactly, against the target's own text. The cost of a pass is measured: a further path is one more span of the
same pass, as a slot backend verifies it, and the drafting of all paths is batched. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decoding import GREEDY, decode, encode_all, load_model, read_prompts
from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved
from inference.backends.registry import load_backend
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT, ModelConfig
from inference.model.proposer import Draft, DraftToken
from inference.model.slots import Backend, Span
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder

MAX_PATHS = 3
PAST_LENGTH = 128
KINDS = ("structured", "open_ended")


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds, by number of paths."""

    pass_ms: dict[int, float]
    step_ms: dict[int, float]


def draft_paths(proposer: ModelProposer, sequence: list[int], gamma: int, num_paths: int) -> list[list[int]]:
    """Return the chain, then paths that leave it at its least certain tokens, each of gamma tokens."""
    chain = _extended(proposer, sequence, [], gamma)
    doubts = sorted(range(gamma), key=lambda place: chain[place].margin)[: num_paths - 1]
    ids = [token.token_id for token in chain]
    paths = [ids]
    for place in doubts:
        begun = [*chain[:place], DraftToken(chain[place].runner_up or 0)]
        paths.append([token.token_id for token in _extended(proposer, sequence, begun, gamma)])
    return paths


def _extended(proposer: ModelProposer, sequence: list[int], begun: list[DraftToken], gamma: int) -> list[DraftToken]:
    path = list(begun)
    while len(path) < gamma:
        token_ids = [*sequence, *(token.token_id for token in path)]
        (extension,) = proposer.extend([Draft(0, token_ids, GREEDY, 1)], ranked=True)
        path += extension or []
    return path


def num_committed(paths: list[list[int]], truth: list[int]) -> int:
    """Return the number of tokens of a pass: the longest agreement of any path, and one of the target's own."""
    agreements = [next((i for i, pair in enumerate(zip(path, truth, strict=False)) if pair[0] != pair[1]), len(path))
                  for path in paths]  # fmt: skip
    return min(max(agreements) + 1, len(truth))


def tokens_per_pass(proposer: ModelProposer, prompt: list[int], text: list[int], gamma: int) -> dict[int, float]:
    """Return the mean over the text, by number of paths."""
    found = {}
    for num_paths in range(1, MAX_PATHS + 1):
        done = passes = 0
        while done < len(text):
            paths = draft_paths(proposer, [*prompt, *text[:done]], gamma, num_paths)
            done += num_committed(paths, text[done : done + gamma + 1])
            passes += 1
        found[num_paths] = len(text) / passes
    return found


def measure_costs(gamma: int) -> Costs:
    """Return the times of a pass over each number of spans, and of one draft step for them."""
    ids = [(7919 * i + 13) % 2000 for i in range(PAST_LENGTH + gamma + 1)]
    target, draft = (_with_slots(path) for path in (BUNDLED_TARGET, BUNDLED_DRAFT))
    for model in (target, draft):
        model.forward([Span(slot, 0, ids[:PAST_LENGTH], 1) for slot in range(MAX_PATHS)])

    def run(width: int, num_paths: int) -> None:
        model = target if width > 1 else draft
        model.forward([Span(slot, PAST_LENGTH, ids[PAST_LENGTH:][:width], width) for slot in range(num_paths)])

    counts = range(1, MAX_PATHS + 1)
    variants = {(width, n): (lambda width=width, n=n: run(width, n)) for width in (1, gamma + 1) for n in counts}
    times = interleaved({str(key): value for key, value in variants.items()}, rounds=40)
    return Costs(
        {n: times[str((gamma + 1, n))].minimum for n in counts}, {n: times[str((1, n))].minimum for n in counts}
    )


def _with_slots(path: Path) -> Backend:
    config = ModelConfig(path, backend="auto", num_slots=MAX_PATHS, sequence_length=2 * PAST_LENGTH, num_threads=1)
    return load_backend(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num_prompts", type=int, default=6)
    args = parser.parse_args()
    costs = measure_costs(args.gamma)
    proposer = ModelProposer(load_model(BUNDLED_DRAFT, backend="auto", threads=1))
    decoder = SlotDecoder(load_model(BUNDLED_TARGET, backend="auto", threads=1))
    results, rows = {}, []
    for kind in KINDS:
        prompts = encode_all(read_prompts(ROOT / "prompts" / f"{kind}.txt", args.num_prompts), BUNDLED_TARGET)
        texts = [decode(decoder, prompt, gamma=0, num_tokens=args.tokens)[0] for prompt in prompts]
        found = [
            tokens_per_pass(proposer, list(prompt), list(text), args.gamma)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        per_pass = {n: sum(each[n] for each in found) / len(found) for n in costs.pass_ms}
        rates = {n: per_pass[n] / (costs.pass_ms[n] + args.gamma * costs.step_ms[n]) * 1e3 for n in per_pass}
        results[kind] = {"tokens_per_pass": per_pass, "tokens_per_s": rates}
        rows += [
            [kind, str(n), f"{per_pass[n]:.2f}", f"{costs.pass_ms[n]:.2f}", f"{costs.step_ms[n]:.2f}",
             f"{rates[n] / rates[1]:.2f}"]
            for n in per_pass
        ]  # fmt: skip
    header = ["prompts", "paths", "tokens/pass", "pass ms", "draft step ms", "tokens/s over one path"]
    print_table(f"Paths of one pass, gamma {args.gamma}", header, rows)
    print_json("paths", results)


if __name__ == "__main__":
    main()
