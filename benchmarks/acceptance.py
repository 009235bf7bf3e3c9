"""Acceptance of draft tokens by four schemes: `python -m benchmarks.acceptance [--pair TARGET,DRAFT]`.

The target answers the prompts of `prompts/` by itself, with this project's noise. At every token of the answers the
laws of target and draft, p and q, then tell how often one draft token would be accepted:

    rejection sampling   a token drawn from q, accepted with probability min(1, p/q): 1 - TV(p, q), the most there is
    shared noise         both choose with the same Gumbel noise, ours: `coupled` has the formula
    greedy draft         q's likeliest token x, accepted with probability p(x): vLLM's default
    independent draws    one token drawn from each law, accepted if they are equal

All are expectations over the draws at the place. `shared noise, drawn` counts the draws themselves: tokens at which the
noise of the project lets the draft choose what the target chose. It must agree with the expectation. `no communication`
is (1 - TV) / (1 + TV): for some laws no scheme does better in which draft and target draw apart (arXiv 2408.07978).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.decoding import encode_all, load_model, read_prompts
from benchmarks.report import print_json, print_table
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT
from specdec.inference.model.slots import Backend, Span
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens

FloatArray = npt.NDArray[np.float64]
DRAWN = "shared noise, drawn"


def main() -> None:
    args = _parser().parse_args()
    target, draft = (_load(Path(path), args) for path in args.pair)
    found: dict[str, dict[str, list[FloatArray]]] = defaultdict(lambda: defaultdict(list))
    for number, (kind, prompt) in enumerate(_prompts(args)):
        sampling = SamplingParams(temperature=args.temperature, seed=number)
        token_ids = answer(target, prompt, sampling, args.tokens)
        for scheme, accepted in acceptances(target, draft, token_ids, len(prompt), sampling).items():
            for column in ("all", kind):
                found[scheme][column].append(accepted)
        print(f"{number + 1} answers", end="\r", flush=True)
    _report(args, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    bundled = f"{BUNDLED_TARGET},{BUNDLED_DRAFT}"
    parser.add_argument(
        "--pair", type=lambda text: text.split(","), default=bundled.split(","), help="TARGET,DRAFT (bundled)"
    )
    parser.add_argument("--prompts", type=Path, default=ROOT / "prompts", help="folder of files (%(default)s)")
    parser.add_argument("--count", type=int, default=24, help="prompts of each file at most (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    return parser


def _load(path: Path, args: argparse.Namespace) -> Backend:
    return load_model(path, backend="torch", dtype="float32", threads=args.threads)


def _prompts(args: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Yield each prompt's kind, which its file's name tells, and its token ids; the demo's prompts are left out."""
    for file in sorted(args.prompts.glob("*.txt")):
        if file.stem != "demo":
            for prompt in encode_all(read_prompts(file, args.count), Path(args.pair[0])):
                yield file.stem.removeprefix("study_").removesuffix("_ended"), prompt


def answer(target: Backend, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Return the ids of a prompt and of `num_tokens` that the target chooses after it, also past an end-of-sequence."""
    token_ids, held = list(prompt), 0
    for _ in range(num_tokens):
        logits = target.forward([Span(0, held, token_ids[held:], 1)])
        held = len(token_ids)
        token_ids += choose_tokens(logits, [sampling], [held])
    return token_ids


def acceptances(
    target: Backend, draft: Backend, token_ids: Sequence[int], num_prompt: int, sampling: SamplingParams
) -> dict[str, FloatArray]:
    """Return, by scheme, the probability that one draft token is accepted at each position of an answer.

    For "shared noise, drawn" it is 1 where the draft chooses the target's token, else 0.

    Args:
        token_ids: the prompt, of `num_prompt` tokens, and the answer.
    """
    rows = [_logits(model, token_ids, num_prompt) for model in (target, draft)]
    positions = range(num_prompt, len(token_ids))
    drawn = [np.array(choose_tokens(each, [sampling] * len(each), positions)) for each in rows]
    p, q = (_law(each.numpy(), sampling.temperature) for each in rows)
    return {**expected(p, q), DRAWN: (drawn[0] == drawn[1]).astype(np.float64)}


def _logits(model: Backend, token_ids: Sequence[int], num_prompt: int) -> torch.Tensor:
    """Return the logits that choose each token after the prompt: [len(token_ids) - num_prompt, vocab_size]."""
    read = token_ids[:-1]
    return torch.as_tensor(model.forward([Span(0, 0, read, len(read) - num_prompt + 1)]))


def _law(logits: FloatArray, temperature: float) -> FloatArray:
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    law: FloatArray = np.maximum(weights / weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return law


def expected(p: FloatArray, q: FloatArray) -> dict[str, FloatArray]:
    """Return, by scheme, the probability that one draft token is accepted, [num_rows].

    Args:
        p, q: probabilities of the target and of the draft, [num_rows, vocab_size], all above 0.
    """
    likeliest, common = q.argmax(axis=1)[:, None], np.minimum(p, q).sum(axis=1)
    return {
        "rejection sampling": common,
        "shared noise": np.array([coupled(*laws) for laws in zip(p, q, strict=True)]),
        "greedy draft": np.take_along_axis(p, likeliest, axis=1)[:, 0],
        "independent draws": (p * q).sum(axis=1),
        "no communication": common / (2.0 - common),
    }


def coupled(p: FloatArray, q: FloatArray) -> float:
    """Return the probability that samples of p and q, drawn with the same Gumbel numbers G_u, are the same token.

    With E_u = exp(-G_u), both choose v if E_u >= E_v max(p_u/p_v, q_u/q_v) for every u. The E_u are independent and
    exponential, so that has the probability 1 / sum over u of max(p_u/p_v, q_u/q_v). The result is the sum over v.
    Sorted by p/q, the maximum is q_u/q_v for the tokens before v and p_u/p_v for the others.
    """
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    before, others = np.cumsum(q) - q, np.cumsum(p[::-1])[::-1]
    return float((1.0 / (before / q + others / p)).sum())


def _report(args: argparse.Namespace, found: Mapping[str, Mapping[str, Sequence[FloatArray]]]) -> None:
    means = {
        scheme: {kind: float(np.concatenate(values).mean()) for kind, values in kinds.items()}
        for scheme, kinds in found.items()
    }
    counts = {kind: sum(map(len, values)) for kind, values in found[DRAWN].items()}
    header = ["acceptance of one draft token", *(f"{kind} ({count})" for kind, count in counts.items())]
    rows = [[scheme, *(f"{kinds[kind]:.3f}" for kind in counts)] for scheme, kinds in means.items()]
    names = " and ".join(Path(path).name for path in args.pair)
    print_table(f"{names}, temperature {args.temperature:g}, in brackets the tokens of each kind", header, rows)
    print_json("acceptance", {"temperature": args.temperature, "tokens": counts, "acceptance": means})


if __name__ == "__main__":
    main()
