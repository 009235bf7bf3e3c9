"""Decoders with graphs that choose tokens on the device and return no logits; requests that need logits are refused.

Greedy decoding is exact. Where the device samples (EAGLE, or the target alone), tokens have the target's distribution.
NxDI's random numbers take no seed, so a request with a seed is refused.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator
from dataclasses import fields

from specdec.inference.backends.neuron.backend import Application
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.backends.neuron.graphs.calls import GREEDY
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p", "seed"}
"""Fields of `SamplingParams` that `DeviceDecoder`, or `check_seed` in model/decoder.py, checks one by one.

Any other field must have its default value.
"""
REQUEST_FIELDS = {
    *("prompt_token_ids", "prompt_logprobs", "grammar", "sampling"),  # refused by name, here or in `check_request`
    *("max_new_tokens", "stop_token_ids", "stop_at_eos", "gamma", "schedule"),  # used by the engine alone
    *("num_committed_tokens", "cache_salt", "draft_session", "include_rejected", "prediction"),
}
"""Fields of `GenerationRequest` that a graph which returns tokens can serve, or that other checks refuse.

Any other field must have its default value.
"""


class DeviceDecoder(GraphDecoder):
    """Decoder over a graph that returns tokens instead of logits.

    Args:
        application: NxDI's application, loaded.
        shape: limits of the compiled graphs.
        method: name of the speculation method, for messages.
        max_top_k: number of the likeliest tokens from which the device samples; 0 if the graph is only greedy.
        remedy: end of a refusal's message, with what the user can do; empty if nothing helps.
    """

    def __init__(
        self, application: Application, shape: SlotShape, *, method: str, max_top_k: int = 0, remedy: str = ""
    ) -> None:
        super().__init__(application, shape)
        self._method = method
        self._max_top_k = max_top_k
        self.seed_invariant = not max_top_k
        self._remedy = remedy
        self._has_cut_top_k = False

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that the graphs, or the choice on the device, cannot serve."""
        super().check(request)
        for field, fault in self._faults(request):
            cannot = f"this server's {self._method} chooses tokens on the device, which cannot do that"
            raise InvalidRequestError(f"{fault}: {cannot}{self._remedy}", field=field)

    def _faults(self, request: GenerationRequest) -> Iterator[tuple[str, str]]:
        """Yield (field of the request, what is wrong with it) for all that the device cannot do."""
        yield from _changed(request, REQUEST_FIELDS)
        yield from _changed(request.sampling, SAMPLING_FIELDS)
        if not request.sampling.greedy:
            yield from self._sampling_faults(request.sampling)

    def _sampling_faults(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        if not self._max_top_k:
            yield "temperature", f"temperature {sampling.temperature} (only 0 is greedy)"
        if sampling.min_p > 0:
            yield "min_p", f"min_p {sampling.min_p}"
        if sampling.top_k > self._max_top_k:
            yield "top_k", f"top_k {sampling.top_k} (it must be 1..{self._max_top_k})"

    def _device_sampling(self, sampling: SamplingParams) -> tuple[float, float, float]:
        """Return top_k, top_p and temperature for the device.

        A top_k of 0, which means all tokens, becomes the largest that the device can do; the first time, a warning is
        logged.
        """
        if sampling.greedy:
            return GREEDY
        if not sampling.top_k and not self._has_cut_top_k:
            logger.warning("top_k 0 is %d on this device: it looks at no more tokens", self._max_top_k)
            self._has_cut_top_k = True
        return (float(sampling.top_k or self._max_top_k), sampling.top_p, sampling.temperature)


def _changed(asked: GenerationRequest | SamplingParams, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (field, what was asked) for each field that is not in `known` and has another value than its default.

    Penalties and biases are such fields, and so is every field added later: the device would silently ignore it.
    """
    for each in fields(asked):
        value = getattr(asked, each.name)
        if each.name not in known and value != each.default:
            yield each.name, f"{each.name} {reprlib.repr(value)}"
