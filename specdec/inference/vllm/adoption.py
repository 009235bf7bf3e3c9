"""Requests of vLLM's own clients, prepared for the draft workers of a pool beside `vllm serve`.

On vLLM's model runner V2 a request keeps its fields. On runner V1, where this project chooses the tokens, vLLM gets the
request as a greedy one.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import GAMMA, MAX_SEED, RANGES, GenerationRequest, Noise, SamplingParams
from specdec.inference.vllm import runner_v1
from specdec.inference.vllm.frames import Wanted
from specdec.inference.vllm.translation import KEY, carried, sampling_fields, signed

logger = logging.getLogger(__name__)


def gamma_of(xargs: Mapping[str, Any]) -> int | None:
    """Return the field `gamma`, the most draft tokens of a pass, in the `vllm_xargs` of a request; None without one.

    Raises:
        InvalidRequestError: its value is not an integer in the range `GAMMA`.
    """
    gamma: Any = xargs.get("gamma")
    if gamma is not None and (type(gamma) is not int or gamma not in GAMMA):
        raise InvalidRequestError(f"vllm_xargs.gamma {gamma!r} must be an integer in {GAMMA}", field="gamma")
    return gamma


def check_params(params: Any) -> None:
    """Refuse a request with a wrong `gamma` in vLLM's own server, since the engine core could not refuse it later.

    Args:
        params: vLLM's `SamplingParams`.

    Raises:
        VLLMValidationError: `gamma` is wrong; the message has its limits, and vLLM answers the client with status 400.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        gamma_of(params.extra_args or {})
    except InvalidRequestError as exc:
        raise VLLMValidationError(str(exc), parameter="vllm_xargs") from exc


def adopted(request: Any, noise: Noise, name: str, gamma: int, *, chooses: bool = False) -> Wanted | None:
    """Prepare the request of a vLLM client, in place; return what a pool's draft workers need of it.

    Its sampling parameters are replaced by a copy, whose `extra_args` have this project's fields too. On runner V2 the
    copy has a seed in any case, on runner V1 it is that of a greedy request.

    Args:
        request: the `Request` in vLLM's engine core.
        noise: rule by which a seed gives the random numbers of a choice of tokens.
        name: name of the request in messages to the pool.
        gamma: most draft tokens of a pass, unless the request asks for fewer.
        chooses: True on runner V1, where this project chooses the tokens.

    Returns:
        None if draft tokens cannot help the request.
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
        runner_v1.make_greedy(params)
        ours = runner_v1.extra_args(asked, name, gamma)
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
    """Return a request of vLLM as a `GenerationRequest`.

    A request without a seed gets one that is made from its id. The sampling parameters forbid tokens that would end the
    output before its minimum length.
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
