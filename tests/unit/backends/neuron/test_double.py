"""NxDI's double knows NxDI's names of parameters, and is as strict as a device."""

from __future__ import annotations

import pytest

from specdec.inference.backends.neuron.graphs.parameters import KNOWN, check_names, parameter_names
from tests.support.nxdi_double.config import NeuronConfig
from tests.support.nxdi_double.rooms import automatic_buckets, fitting_bucket

pytestmark = pytest.mark.usefixtures("on_double")


def test_parameter_names_come_from_the_class() -> None:
    names = parameter_names(NeuronConfig)
    assert {"tp_degree", "fused_qkv", "speculation_length"} <= names
    assert "vocab_parallel" not in names, "the double does not have it"
    assert "vocab_parallel" in parameter_names(None) == KNOWN
    check_names({"vocab_parallel": True}, KNOWN)


def test_its_buckets_are_those_of_nxdi() -> None:
    assert automatic_buckets(72) == [72]
    assert automatic_buckets(300) == [128, 300]
    assert automatic_buckets(1024) == [128, 256, 512, 1024]
    assert [fitting_bucket([128, 300], length) for length in (1, 127, 128, 299, 300)] == [128, 128, 300, 300, 300]
    with pytest.raises(ValueError, match="Input len 301 exceeds largest bucket"):
        fitting_bucket([128, 300], 301)
