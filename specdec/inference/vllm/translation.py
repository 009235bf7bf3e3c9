"""Translation of this project's requests to vLLM's, and of vLLM's results back.

A request's `extra_args` have what vLLM has no field for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specdec.inference.caller import caller
from specdec.inference.commit import FinishReason, TokenLogprobs
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import (
    MAX_SEED,
    GenerationRequest,
    MinLengthSampling,
    Noise,
    SamplingParams,
)

KEY = "specdec"
"""Key of this project's entries in a request's `extra_args`, and in vLLM's `additional_config`."""
METHOD = "ngram"
"""Speculation method in vLLM's configuration, beside which draft workers propose: its lookup is switched off."""
SOCKET = "core"
"""Name of the socket in a mailbox's folder."""
MAX_HELD_BACK = 127
"""Most stop tokens of a request with a minimum length on vLLM's runner V2, which adds one; more would crash vLLM."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def sampling_of(values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from their fields in `extra_args`; without any, those of the greedy choice."""
    biases = tuple((token_id, bias) for token_id, bias in values.get("logit_bias", ()))
    values = {**values, "logit_bias": biases, "noise": Noise(values.get("noise", Noise.SPECDEC))}
    kind: type[SamplingParams] = SamplingParams
    if "held_back" in values:
        kind, values["held_back"] = MinLengthSampling, tuple(values["held_back"])
    return kind(**values)


def carried(request: GenerationRequest, name: str, gamma: int) -> dict[str, Any]:
    """Return what vLLM's core needs of a request, and vLLM has no field for.

    Args:
        request: the request.
        name: name of the request in messages between the core and this project's server or pool.
        gamma: most draft tokens of a pass, unless the request asks for fewer.
    """
    return {
        "name": name,
        "gamma": gamma if request.gamma is None else min(gamma, request.gamma),
        "output_start": request.output_start,
        "seed": None if request.sampling.greedy else request.sampling.seed,  # for answers that repeat
        "prediction": request.prediction,
        "owner": caller().owner(request.cache_salt),
    }


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as a dictionary by field name, from which `sampling_of` makes them again."""
    return {each.name: getattr(sampling, each.name) for each in fields(sampling)}


def own_fields(request: GenerationRequest, max_tokens: int) -> dict[str, Any]:
    """Return vLLM's own fields for a request on runner V2, except that for its grammar.

    Args:
        request: the request.
        max_tokens: most output tokens that vLLM makes, which limits the minimum length too.

    Raises:
        InvalidRequestError: vLLM has no such seed, or cannot hold back so many tokens.
    """
    sampling = request.sampling
    if sampling.seed == MAX_SEED:
        raise InvalidRequestError(f"seed {sampling.seed} is not valid: to vLLM it is none; take another", field="seed")
    left = max(0, request.min_new_tokens - request.num_committed_tokens)
    if left and len(request.stop_token_ids) > MAX_HELD_BACK:
        fault = (
            f"{len(request.stop_token_ids)} stop_token_ids exceed {MAX_HELD_BACK}, vLLM's limit beside min_new_tokens"
        )
        raise InvalidRequestError(fault, field="stop_token_ids")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    own = {name: getattr(sampling, name) for name in names}
    return own | {
        "seed": signed(sampling.seed),
        "min_tokens": min(left, max_tokens),
        "logit_bias": dict(sampling.logit_bias) or None,
        "prompt_logprobs": None if request.num_committed_tokens else request.prompt_logprobs,
    }


def signed(seed: int) -> int:
    """Return the signed 64-bit integer, which vLLM takes as a seed, with the same bits as the unsigned `seed`."""
    return seed - 2**64 * (seed >= 2**63)


def scores(token_id: int, entries: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Return the log-probabilities of a position: the token's own, then those of the best `count`.

    Args:
        entries: vLLM's log-probabilities by token id, each with its rank, from 1.
    """
    best = sorted((each.rank, other, each.logprob) for other, each in entries.items() if each.rank <= count)[:count]
    ids, values = (token_id, *(other for _, other, _ in best)), (entries[token_id].logprob, *(p for *_, p in best))
    return TokenLogprobs(ids, values)
