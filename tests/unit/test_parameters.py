"""A sampling parameter has to be known in several places; one that forgets it fails here, not in silence."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference.cli.roles.registry import parser_of
from inference.config import ROOT
from inference.errors import InvalidRequestError
from inference.gateway.schema import CompletionBody
from inference.request import RANGES, SamplingParams
from inference.workers.convert import sampling_from_message, sampling_to_message

NAMES = {field.name for field in fields(SamplingParams)}
ASKING_ROLES = ("draft", "fused_client", "verify_target", "verify_draft")
NO_FLAG = {"logit_bias"}
"""A table of hundreds of tokens is no flag."""


def another_value(name: str) -> Any:
    """One that is not the default, and that every place can hold."""
    if name == "logit_bias":
        return ((7, 2.5),)
    high = RANGES[name].high
    return 3 if isinstance(high, int) else min(high, 0.5)


def test_every_number_has_a_range() -> None:
    assert NAMES - set(RANGES) == {"logit_bias"}


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
def test_each_is_described_with_its_range(name: str) -> None:
    """The .proto is where a client author looks."""
    lines = (ROOT / "protos" / "specdec" / "v1" / "specdec.proto").read_text().splitlines()
    message = lines[lines.index("message SamplingParams {") :]
    place = next(i for i, line in enumerate(message) if f" {name} = " in line)
    comment = "\n".join(line for line in message[max(0, place - 4) : place] if line.lstrip().startswith("//"))
    low, high = RANGES[name].low, RANGES[name].high
    if high <= 100:
        assert f"{low:g}" in comment
        assert f"{high:g}" in comment


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_value_outside_its_range_is_refused_by_field(name: str) -> None:
    limits = RANGES[name]
    outside: Any = limits.low if limits.above else limits.low - 1
    beyond: Any = limits.high + 1
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: outside})
    assert caught.value.field == name
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: beyond})
