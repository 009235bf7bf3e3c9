"""Claim on sampling: a server's tokens are distributed as the probabilities it reports; wrong rules would be found."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from scripts.claims import plan
from scripts.claims.servers import Starts
from scripts.claims.verdict import Verdict
from specdec.comparison.run.law import NUM_CLASSES, NUM_RANKS, Counts, answers_of, p_value
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port

Law = npt.NDArray[np.float64]
Rule = Callable[[Law, np.random.Generator], int]
"""Function that draws a token's class (its rank, or "not ranked") from the probabilities of the classes."""


def _drawn(law: Law, rng: np.random.Generator) -> int:
    return int(rng.choice(len(law), p=law / law.sum()))


def _drafted(p: Law) -> Law:
    """Return the probabilities of an imagined draft, which are flatter than those of the target, `p`."""
    return np.asarray(p**0.6 / (p**0.6).sum())


def _rejection(p: Law, rng: np.random.Generator, residual: Law) -> int:
    q = _drafted(p)
    token = _drawn(q, rng)
    return token if rng.random() * q[token] <= p[token] else _drawn(residual, rng)


def _cooler(p: Law, rng: np.random.Generator) -> int:
    return _drawn(p**1.1, rng)


def _from_target(p: Law, rng: np.random.Generator) -> int:
    return _rejection(p, rng, p)


def _likelier(p: Law, rng: np.random.Generator) -> int:
    """Draw with a bias to the most probable class: 63 % instead of 60 %, and alike at other probabilities.

    vLLM drew so before its pull request 54282.
    """
    changed = p / p.sum()
    more = changed[0] * (1.0 - changed[0]) / 8.0
    changed[1:] *= 1.0 - more / (1.0 - changed[0])
    changed[0] += more
    return _drawn(changed, rng)


MUTANTS: dict[str, Rule] = {
    "right rejection sampling": lambda p, rng: _rejection(p, rng, np.maximum(p - _drafted(p), 0.0) + 1e-15),
    "residual drawn from the target's law": _from_target,
    "best token in 63 % for 60 %": _likelier,
    "temperature 0.91 for 1": _cooler,
}
"""Rules by which speculation may draw tokens; the first one is right, and the test must find the others wrong."""


async def texts_follow_the_law(size: plan.Size, starts: Starts, url: str | None) -> Verdict:
    """Test whether a server's tokens are distributed as it reports; return the verdict.

    The server is one of this project with draft and target, or the one at `url`. Then the same test must find that
    wrong rules draw from other probabilities than those reported.
    """
    if url is None:
        port, grpc = free_port(), free_port()
        pair = ("--target_model", str(BUNDLED_TARGET), "--draft_model", str(BUNDLED_DRAFT), "--threads", "1")
        ports = ("--port", str(grpc), "--http_port", str(port))
        async with starts.server("fused_target", *pair, *ports, "--drafting", "always", "--batch", "8", port=grpc):
            counts = await answers_of(f"http://127.0.0.1:{port}", None, size.num_law, 8)
    else:
        counts = await answers_of(url, None, size.num_law, 8)
    values = {"the server": p_value(counts)} | {name: p_value(mutated(counts, rule)) for name, rule in MUTANTS.items()}
    rows = [["rule", "p-value", "found wrong"]]
    rows += [[name, f"{value:.5f}", "yes" if value < plan.LAW_ALPHA else "no"] for name, value in values.items()]
    (own, right, *wrong) = values.values()
    found = sum(value < plan.LAW_ALPHA for value in wrong)
    return Verdict(
        f"Texts follow the reported law (p at least {plan.LAW_ALPHA:g}), and mutants do not",
        f"p = {own:.4f} over {len(counts.tokens)} tokens; {found} of {len(wrong)} mutants found in {plan.NUM_MUTANT}",
        own >= plan.LAW_ALPHA and right >= plan.LAW_ALPHA and found == len(wrong),
        rows,
    )


def mutated(counts: Counts, rule: Rule) -> Counts:
    """Return counts of tokens that a rule draws from the probabilities reported with the tokens in `counts`."""
    rng, repeats = np.random.default_rng(plan.SEED), math.ceil(plan.NUM_MUTANT / len(counts.tokens))
    tokens = [(begun, before, rule(_law(best), rng), best) for begun, before, _, best in counts.tokens * repeats]
    return Counts(tokens)


def _law(best: list[float]) -> Law:
    law = np.full(NUM_CLASSES, 1e-12)
    law[: len(best)] = best
    law[NUM_RANKS] = max(1e-12, 1.0 - sum(best))
    law /= law.sum()
    return law
