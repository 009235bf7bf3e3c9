"""Requests of vLLM's own clients, changed so that vLLM decodes greedily and this project's code samples the tokens.

Penalties, seeds and limits come from vLLM's fields. Parameters that vLLM refuses with speculation come in `vllm_xargs`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import (
    GAMMA,
    MAX_SEED,
    RANGES,
    GenerationRequest,
    Noise,
    SamplingParams,
    check_logit_bias,
)
from specdec.inference.vllm.frames import Wanted
from specdec.inference.vllm.translation import extra_args

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Xargs:
    """This project's fields in the `vllm_xargs` of a request to vLLM's own server.

    Attributes:
        gamma: most draft tokens of a pass; None leaves it to the server, 0 switches drafts off.
        min_p: keep only tokens with at least this share of the best token's probability.
        logit_bias: (token id, bias) pairs, added to the logits; in the request they are the text of a JSON object.
    """

    gamma: int | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any], vocab_size: int) -> Self:
        """Read the fields from a request's `vllm_xargs`; other fields are ignored.

        Raises:
            InvalidRequestError: one has a wrong value, which the message names with the limit.
        """
        gamma, min_p = values.get("gamma"), values.get("min_p", 0.0)
        if gamma is not None and (type(gamma) is not int or gamma not in GAMMA):
            raise InvalidRequestError(f"vllm_xargs.gamma {gamma!r} must be an integer in {GAMMA}", field="gamma")
        if not isinstance(min_p, (int, float)) or min_p not in RANGES["min_p"]:
            raise InvalidRequestError(f"vllm_xargs.min_p {min_p!r} must be in {RANGES['min_p']}", field="min_p")
        bias = values.get("logit_bias", "{}")
        try:
            pairs = tuple((int(token), float(bias)) for token, bias in json.loads(bias).items())
        except (TypeError, ValueError, AttributeError, RecursionError) as exc:
            fault = f"vllm_xargs.logit_bias {bias!r:.80} must be a JSON object's text, such as '{{\"50256\": -100}}'"
            raise InvalidRequestError(fault, field="logit_bias") from exc
        check_logit_bias(SamplingParams(logit_bias=pairs), vocab_size=vocab_size)
        return cls(gamma, float(min_p), pairs)


def adopted(request: Any, name: str, gamma: int, vocab_size: int, noise: Noise = Noise.SPECDEC) -> None:
    """Make the request of a vLLM client greedy, in place; this project's code in vLLM's workers samples instead.

    Args:
        gamma: most draft tokens of a pass.
    """
    params = request.sampling_params = copy.copy(request.sampling_params)
    extra = params.extra_args or {}
    try:
        asked = _asked(request, Xargs.read(extra, vocab_size), noise)
    except InvalidRequestError as exc:  # `Door` refuses it before, in vLLM's own server; an error here would end vLLM
        logger.warning("request %s gets the greedy choice: %s", request.request_id, exc)
        asked = GenerationRequest(tuple(request.all_token_ids))
    params.temperature, params.top_k, params.top_p, params.seed = 0.0, 0, 1.0, None
    params.presence_penalty, params.frequency_penalty, params.repetition_penalty = 0.0, 0.0, 1.0
    params.__dict__.clear()  # of values that vLLM has derived from these
    params.extra_args = {**extra, **extra_args(asked, name, gamma)}


def _asked(request: Any, xargs: Xargs, noise: Noise) -> GenerationRequest:
    """Return the vLLM request as a `GenerationRequest` with its sampling parameters.

    A request without a seed gets one made from its id. Tokens that may not end the output yet are held back.
    """
    params = request.sampling_params
    digest = hashlib.sha256(request.request_id.encode()).digest()
    sampling = SamplingParams(
        temperature=min(params.temperature, RANGES["temperature"].high),
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=xargs.min_p,
        seed=(int.from_bytes(digest[:8], "little") if params.seed is None else params.seed) & MAX_SEED,
        repetition_penalty=min(params.repetition_penalty, RANGES["repetition_penalty"].high),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=xargs.logit_bias,
        noise=noise,
    )
    asked = GenerationRequest(
        tuple(request.all_token_ids), sampling, stop_at_eos=True, min_new_tokens=params.min_tokens, gamma=xargs.gamma
    )
    return replace(asked, sampling=asked.effective_sampling(frozenset(params.all_stop_token_ids)))


def wanted(request: Any, ours: Mapping[str, Any]) -> Wanted | None:
    """Return what a pool's draft workers need of a request changed by `adopted`; None if drafts cannot help it."""
    if not ours["gamma"] or request.prompt_embeds is not None or request.resumable:
        return None
    tokens, sampling = list(request.all_token_ids), ours["sampling"] or {}
    return Wanted(tokens, ours["output_start"], max(1, request.max_tokens), ours["gamma"], sampling)
