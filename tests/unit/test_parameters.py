"""All code that must know each sampling parameter knows it: a test here fails if one is left out somewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.decoders.device_target import TargetDecoder
from specdec.inference.backends.neuron.decoders.fused import FusedDecoder
from specdec.inference.backends.neuron.decoders.medusa import MedusaDecoder
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.config import ConnectionConfig, Emulation
from specdec.inference.declared import declared
from specdec.inference.errors import InvalidRequestError
from specdec.inference.gateway.bodies.schema import CompletionBody
from specdec.inference.model.decoder import check_request
from specdec.inference.request import (
    ANY_JSON_OBJECT,
    RANGES,
    GenerationRequest,
    SamplingParams,
    Schedule,
)
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.sampling.penalties import TokensBefore
from specdec.inference.serving.models import PairSettings
from specdec.inference.workers.calls.convert import sampling_from_message, sampling_to_message
from specdec.inference.workers.completion import CompletionRequest
from specdec.parameters import ClientSettings, ModelSettings, Parameters

NAMES = {field.name for field in fields(SamplingParams)} - {"noise"}  # a request has no part in it
ASKING_ROLES = ("draft", "fused_client", "verify_target", "verify_fused", "verify_draft")
NO_FLAG = {"logit_bias"}
"""Sampling parameters without a command-line flag, since a table of tokens does not fit into a flag."""


def another_value(name: str) -> Any:
    """Return a value of a sampling parameter that is not its default, and that every format can represent."""
    if name == "logit_bias":
        return ((7, 2.5),)
    high = RANGES[name].high
    return 3 if isinstance(high, int) else min(high, 0.5)


def test_every_number_has_a_range() -> None:
    assert NAMES - set(RANGES) == {"logit_bias"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_changes_the_choice(name: str) -> None:
    """Each sampling parameter has an effect: another value of it changes the chosen tokens.

    Regression: a parameter that every format accepted, but that no computation used, passed all tests.
    """
    rows, plain = 64, SamplingParams(temperature=0.9, seed=1)
    logits = np.random.default_rng(5).normal(size=(rows, 32)).astype(np.float32)
    before = [TokensBefore.of((1, 2, 3, 7, 7, 9), output_start=2)] * rows

    def chosen(sampling: SamplingParams) -> list[int]:
        return choose_tokens(logits, [sampling] * rows, range(6, 6 + rows), before)

    assert chosen(replace(plain, **{name: another_value(name)})) != chosen(plain)


def test_the_protocol_carries_every_one() -> None:
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_survives_the_wire(name: str) -> None:
    sampling = SamplingParams(**{name: another_value(name)})
    assert sampling != SamplingParams()
    assert sampling_from_message(sampling_to_message(sampling, sampling.seed)) == sampling


@pytest.mark.parametrize("name", sorted(NAMES - {"seed"}))
def test_each_is_taken_over_http(name: str) -> None:
    value = another_value(name)
    body = {str(key): bias for key, bias in value} if name == "logit_bias" else value
    assert getattr(CompletionBody.model_validate({"prompt": "x", name: body}).sampling(), name) == value


@pytest.mark.parametrize("role", ASKING_ROLES)
def test_each_has_a_flag(role: str) -> None:
    args = vars(parser_of(role).parse_args([]))
    assert set(args) >= NAMES - NO_FLAG


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_value_outside_its_range_is_refused_by_field(name: str) -> None:
    """A value outside its range, also NaN and infinity, is refused with the field's name and the range's end."""
    limits = RANGES[name]
    outside: list[Any] = [limits.low if limits.above else limits.low - 1, limits.high + 1]
    if isinstance(limits.high, float):
        outside += [math.nextafter(limits.high, math.inf), math.nan, math.inf, -math.inf]
    most = f"{limits.high:g}" if isinstance(limits.high, float) else limits.high
    for value in outside:
        with pytest.raises(InvalidRequestError, match=f"^{name} {re.escape(str(value))} .*{most}") as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name


class Unloaded:
    """Stand-in for a compiled model, which fails the test if its graph runs."""

    def forward(self, **tensors: Any) -> Any:
        raise AssertionError("a check runs no graph")


SHAPE = SlotShape(
    vocab_size=64, num_slots=1, length=64, width=4, reserved=4, max_prompt=32, prompt_width=32, slot_bytes=1
)
DEVICE_DECODERS: list[DeviceDecoder] = [
    TargetDecoder(Unloaded(), SHAPE, method="target", max_top_k=256),
    FusedDecoder(Unloaded(), SHAPE, method="eagle", max_top_k=256),
    FusedDecoder(Unloaded(), SHAPE, method="fused"),
    MedusaDecoder(Unloaded(), SHAPE, {"medusa_tree": [[0]], "num_medusa_heads": 1}),
]
"""Decoders that choose tokens on the device: two that sample, and two that are only greedy."""
SERVED_ON_DEVICE = {"temperature", "top_k", "top_p", "seed"}
"""Parameters that samplers on the device obey; `check_seed` of inference/model/decoder.py handles seeds."""


@dataclass(frozen=True, slots=True)
class LaterSampling(SamplingParams):
    typical_p: float = 0.0


@dataclass(frozen=True, slots=True)
class LaterRequest(GenerationRequest):
    stop_words: tuple[str, ...] = ()


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("decoder", DEVICE_DECODERS[:2])
def test_a_device_sampler_serves_or_names_each_parameter(decoder: DeviceDecoder, name: str) -> None:
    request = GenerationRequest((3, 4), replace(SamplingParams(temperature=0.7), **{name: another_value(name)}))
    if name in SERVED_ON_DEVICE:
        check_request(decoder, request)
        return
    with pytest.raises(InvalidRequestError, match=rf"{name} .*chooses tokens on the device") as caught:
        check_request(decoder, request)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("later", "field", "value"),
    [
        (GenerationRequest((3, 4), LaterSampling(typical_p=0.3)), "typical_p", "0.3"),
        (GenerationRequest((3, 4), LaterSampling(temperature=0.7, typical_p=0.3)), "typical_p", "0.3"),
        (LaterRequest((3, 4), stop_words=("END",)), "stop_words", "('END',)"),
    ],
)
@pytest.mark.parametrize("decoder", DEVICE_DECODERS)
def test_a_device_refuses_what_is_added_later(
    decoder: DeviceDecoder, later: GenerationRequest, field: str, value: str
) -> None:
    """A decoder that chooses tokens on the device refuses every parameter that it does not know.

    `later` is a request with a new parameter `field`, which has this `value`.

    Regression: the decoder listed the parameters to refuse, so it would have ignored a new one without an error.
    """
    words = re.escape(f"{field} {value}: ") + ".*chooses tokens on the device"
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_request(decoder, later)
    assert caught.value.field == field
    check_request(decoder, replace(later, **({"sampling": LaterSampling()} if field == "typical_p" else {field: ()})))


SERVED_FIELDS: dict[str, Any] = {
    "prompt_token_ids": (5, 6),
    "sampling": SamplingParams(),
    "max_new_tokens": 5,
    "stop_token_ids": frozenset({7}),
    "stop_at_eos": True,
    "gamma": 2,
    "schedule": Schedule.SYNC,
    "num_committed_tokens": 1,
    "cache_salt": "salt",
    "draft_session": "name",
    "include_rejected": True,
    "prediction": (5, 6),
}
REFUSED_FIELDS: dict[str, Any] = {
    "logprobs": 0,
    "min_new_tokens": 2,
    "prompt_logprobs": 0,
    "grammar": ANY_JSON_OBJECT,
    "adapter": "poet",
    "audits": True,
}


def test_each_request_field_is_served_or_refused() -> None:
    assert SERVED_FIELDS.keys() | REFUSED_FIELDS.keys() == {field.name for field in fields(GenerationRequest)}


@pytest.mark.parametrize("decoder", DEVICE_DECODERS)
def test_a_device_serves_or_names_each_field(decoder: DeviceDecoder) -> None:
    check_request(decoder, GenerationRequest(**SERVED_FIELDS))
    for name, value in REFUSED_FIELDS.items():
        with pytest.raises(InvalidRequestError, match=name) as caught:
            check_request(decoder, GenerationRequest((3, 4), stop_at_eos=True, **{name: value}))
        assert caught.value.field == name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_parameters_that_truncate_are_known(name: str) -> None:
    assert SamplingParams(**{name: another_value(name)}).truncates == (name in {"top_k", "top_p", "min_p"})


REWRITTEN = {"logit_bias", "stop", "stop_token_ids"}
"""Parameters of the Python library that a program may give in more forms than a request has."""


def test_the_librarys_parameters_are_those_of_requests() -> None:
    """The library's `Parameters` has each field of a request that a program may set, with the field's type."""
    hints = {**get_type_hints(SamplingParams), **get_type_hints(CompletionRequest)}
    own = {"prompt", "sampling", "unsaid", "resume", "deadline", "grammar", "noise", "audit"}
    shown = get_type_hints(Parameters)
    assert shown.keys() == (hints.keys() - own) | {"structured_outputs"}
    rest = shown.keys() - REWRITTEN - {"structured_outputs"}
    assert {name: shown[name] for name in rest} == {name: hints[name] for name in rest}


@pytest.mark.parametrize(
    ("shown", "kind", "models"),
    [
        (ModelSettings, PairSettings, {"target_model", "draft_model"}),
        (ClientSettings, ConnectionConfig, {"target_host"}),
    ],
)
def test_the_librarys_settings_are_flags(shown: Any, kind: type[Any], models: set[str]) -> None:
    """`ModelSettings` and `ClientSettings` have every flag of their configuration class, with the type of its value.

    `shown` is one of these two, `kind` its configuration class, and `models` are the flags that it leaves out.
    """
    flags = {each.setting.key: each.kind for each in declared(kind) if each.setting.key not in models}
    flags |= {"batch": int} if kind is ConnectionConfig else {}
    written = {Path: str | Path, Mapping: Mapping[str, Any], Emulation: str}
    assert get_type_hints(shown) == {name: written.get(each, each) | None for name, each in flags.items()}
