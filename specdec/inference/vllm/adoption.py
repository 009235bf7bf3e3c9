"""Requests of vLLM's own clients, prepared for draft workers: on runner V2 they stay what they are, on V1 we sample."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import GAMMA, MAX_SEED, RANGES, GenerationRequest, Noise, SamplingParams
from specdec.inference.vllm.frames import Wanted
from specdec.inference.vllm.translation import KEY, carried, extra_args, sampling_fields, signed

logger = logging.getLogger(__name__)


def gamma_of(xargs: Mapping[str, Any]) -> int | None:
    """Return the field `gamma` in the `vllm_xargs` of a request, most draft tokens of a pass; None if it has none.

    Raises:
        InvalidRequestError: it has a wrong value.
    """
    gamma: Any = xargs.get("gamma")
    if gamma is not None and (type(gamma) is not int or gamma not in GAMMA):
        raise InvalidRequestError(f"vllm_xargs.gamma {gamma!r} must be an integer in {GAMMA}", field="gamma")
    return gamma


def check_params(params: Any) -> None:
    """Refuse a wrong `gamma` in vLLM's own server, before its engine core, which can refuse nothing.

    Args:
        params: vLLM's `SamplingParams`.

    Raises:
        VLLMValidationError: names it and its limits; vLLM answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        gamma_of(params.extra_args or {})
    except InvalidRequestError as exc:
        raise VLLMValidationError(str(exc), parameter="vllm_xargs") from exc


def adopted(request: Any, noise: Noise, name: str, gamma: int, *, chooses: bool = False) -> Wanted | None:
    """Prepare the request of a vLLM client, in place; return what a pool's draft workers need of it.

    Args:
        gamma: most draft tokens of a pass.
        chooses: True on runner V1, where this project's code samples, so that the request becomes greedy for vLLM.

    Returns:
        None if drafts cannot help the request.
    """
    params = request.sampling_params = copy.copy(request.sampling_params)
    extra = params.extra_args or {}
    try:
        asked = _asked(request, noise, gamma_of(extra))
    except InvalidRequestError as exc:  # an error here would end vLLM
        logger.warning("request %s is served without its gamma and logit_bias: %s", request.request_id, exc)
        params.logit_bias = None
        asked = _asked(request, noise)
    if chooses:
        params.temperature, params.top_k, params.top_p, params.min_p, params.seed = 0.0, 0, 1.0, 0.0, None
        params.presence_penalty, params.frequency_penalty, params.repetition_penalty = 0.0, 0.0, 1.0
        params.logit_bias, ours = None, extra_args(asked, name, gamma)
    else:
        params.seed = signed(asked.sampling.seed)  # workers cannot draw with a seed that they do not have
        ours = {KEY: carried(asked, name, gamma)}
    params.__dict__.clear()  # of values that vLLM has derived from these
    params.extra_args = {**extra, **ours}
    limit = ours[KEY]["gamma"]
    if not limit or request.prompt_embeds is not None or request.resumable:
        return None
    tokens = list(request.all_token_ids)
    return Wanted(tokens, len(tokens), max(1, request.max_tokens), limit, sampling_fields(asked.sampling))


def _asked(request: Any, noise: Noise, gamma: int | None = None) -> GenerationRequest:
    """Return the vLLM request as a `GenerationRequest` with its sampling parameters.

    A request without a seed gets one made from its id. Tokens that may not end the output yet are held back.
    """
    params = request.sampling_params
    digest = hashlib.sha256(request.request_id.encode()).digest()
    sampling = SamplingParams(
        temperature=min(params.temperature, RANGES["temperature"].high),
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=(int.from_bytes(digest[:8], "little") if params.seed is None else params.seed) & MAX_SEED,
        repetition_penalty=min(params.repetition_penalty, RANGES["repetition_penalty"].high),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        noise=noise,
    )
    asked = GenerationRequest(
        tuple(request.all_token_ids), sampling, stop_at_eos=True, min_new_tokens=params.min_tokens, gamma=gamma
    )
    return replace(asked, sampling=asked.effective_sampling(frozenset(params.all_stop_token_ids)))
