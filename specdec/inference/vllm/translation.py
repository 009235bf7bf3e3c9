"""Translation of requests to vLLM's and of results back: greedy for vLLM; `extra_args` has this project's parameters.

vLLM's own sampling is not used: it counts penalties, minimum lengths and grammars from the start of its output. The
prompt of a resumed request ends with output, so those must count from `output_start`, or the text would be another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specdec.inference.caller import caller
from specdec.inference.commit import FinishReason, TokenLogprobs
from specdec.inference.engine.target_session import MAX_ADJUSTED_GAMMA
from specdec.inference.request import (
    GenerationRequest,
    Grammar,
    GrammarKind,
    MinLengthSampling,
    Noise,
    Preamble,
    SamplingParams,
)

KEY = "specdec"
"""Key of this project's entries in a request's `extra_args`, and in vLLM's `additional_config`."""
SOCKET = "core"
"""Name of the socket in a mailbox's folder."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class Asked:
    """Parameters by which a worker of vLLM chooses a request's tokens."""

    sampling: SamplingParams
    output_start: int
    grammar: Grammar | None

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Asked | None:
        """Read a request's `extra_args`; return None if the choice is greedy or our parameters are missing."""
        if extra_args is None or not chooses(extra_args):
            return None
        ours = extra_args[KEY]
        return cls(sampling_of(ours["sampling"]), ours["output_start"], _grammar(ours["grammar"]))


def chooses(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether this project chooses a request's tokens: its parameters are there, and not for greedy choice."""
    ours = None if extra_args is None else extra_args.get(KEY)
    return ours is not None and ours["sampling"] is not None


def sampling_of(values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from their fields in `extra_args`; without any, those of the greedy choice."""
    biases = tuple((token_id, bias) for token_id, bias in values.get("logit_bias", ()))
    values = {**values, "logit_bias": biases, "noise": Noise(values.get("noise", Noise.SPECDEC))}
    kind: type[SamplingParams] = SamplingParams
    if "held_back" in values:
        kind, values["held_back"] = MinLengthSampling, tuple(values["held_back"])
    return kind(**values)


def _grammar(parts: Sequence[str] | None) -> Grammar | None:
    if parts is None:
        return None
    kind, text, preamble = parts
    return Grammar(GrammarKind(kind), text, Preamble(preamble))


def extra_args(request: GenerationRequest, name: str, gamma: int) -> dict[str, Any]:
    """Return the `extra_args` of a request, for vLLM's core and workers; their sampling is None for greedy choice."""
    sampling, grammar = request.sampling, request.grammar
    adjusts = sampling.penalizes or bool(sampling.logit_bias)
    is_plain = sampling.greedy and not adjusts and grammar is None and not isinstance(sampling, MinLengthSampling)
    limit = min(gamma, MAX_ADJUSTED_GAMMA) if adjusts else gamma
    ours = {
        "name": name,
        "gamma": limit if request.gamma is None else min(limit, request.gamma),
        "sampling": None if is_plain else {each.name: getattr(sampling, each.name) for each in fields(sampling)},
        "output_start": request.output_start,
        "prediction": request.prediction,
        "owner": caller().owner(request.cache_salt),
        "grammar": None if grammar is None else (grammar.kind.value, grammar.text, grammar.preamble.value),
    }
    return {KEY: ours}


def scores(token_id: int, entries: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Return the log-probabilities of a position: the token's own, then those of the best `count`.

    Args:
        entries: vLLM's log-probabilities by token id, each with its rank, from 1.
    """
    best = sorted((each.rank, other, each.logprob) for other, each in entries.items() if each.rank <= count)[:count]
    ids, values = (token_id, *(other for _, other, _ in best)), (entries[token_id].logprob, *(p for *_, p in best))
    return TokenLogprobs(ids, values)
