"""If passes compute in fixed windows of positions, logits have the same bits whatever else a pass computes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from specdec.inference.backends.architectures import has_experts
from specdec.inference.backends.pytorch import backend as pytorch_backend
from specdec.inference.backends.pytorch.backend import CAPTURED, TorchBackend, load_torch_backend
from specdec.inference.backends.pytorch.passes import EagerPasses
from specdec.inference.backends.pytorch.shapes import Buckets, Shape, Shapes
from specdec.inference.backends.pytorch.static_pass import FixedShapes
from specdec.inference.backends.pytorch.windows import WindowPasses, choose_windows
from specdec.inference.config import BUNDLED_TARGET, ModelConfig
from specdec.inference.model.slots import Span, Windows
from tests.conftest import ModelDirectories
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS, BackendContract, Uncompiled
from tests.support.histories import DRAFTS, KINDS, LENGTH, History, different, num_different, read_whole, texts_of
from tests.support.models import CONTRACTS, EXPERTS, FAMILIES, save_tiny_model, tiny_model

WINDOWS = Windows(16, NUM_SLOTS)
BUCKETS = Buckets(widths=(16,), prompts=(), batches=(NUM_SLOTS,), shortest=20, shares_slots=True)
HALVES = ("bfloat16", "float16")
QUICK = ("llama-bfloat16", "llama-float16", "gemma3-bfloat16", "qwen3, mixed layers-bfloat16")
TOGETHER = ("alone", "mixed")
"""The two kinds of request history that together cover what all kinds in `KINDS` cover."""
EVERY = [
    *(pytest.param(*name.split("-"), TOGETHER, id=name) for name in QUICK),
    *(
        pytest.param(family, dtype, KINDS, id=f"{family}-{dtype}-every kind", marks=pytest.mark.release)
        for family in CONTRACTS["torch", "bfloat16"]
        for dtype in HALVES
    ),
]
"""Cases (family, dtype, kinds of history) whose logits must have equal bits; those not in QUICK run at releases."""


def windowed(
    family: str, dtype: torch.dtype = torch.float32, *, fixed: bool = False, length: int = LENGTH
) -> TorchBackend:
    shapes = FixedShapes(Uncompiled(), BUCKETS) if fixed else None
    model = tiny_model(family).to(dtype)
    backend = TorchBackend(model, num_slots=NUM_SLOTS, max_length=length, fixed=shapes, windows=WINDOWS)
    backend.warm_up()
    return backend


class TestContract(BackendContract):
    families: Collection[str] = ("llama", "gpt2", "gpt_oss")
    fixed = False

    def load(self, family: str) -> TorchBackend:
        return windowed(family, fixed=self.fixed, length=MAX_LENGTH)


class TestContractInFixedShapes(TestContract):
    families = ("llama", "gemma2")
    faults = ("more slots",)
    fixed = True


@pytest.mark.parametrize(("family", "dtype", "kinds"), EVERY)
def test_no_history_changes_a_bit(family: str, dtype: str, kinds: Collection[str]) -> None:
    assert set(different(windowed(family, getattr(torch, dtype)), kinds).values()) == {0}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_history_changes_a_bit_in_fixed_shapes(family: str) -> None:
    assert set(different(windowed(family, torch.bfloat16, fixed=True), TOGETHER).values()) == {0}


def test_no_history_changes_a_bit_in_float32() -> None:
    assert set(different(windowed("llama")).values()) == {0}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_counted_and_not_promised(family: str) -> None:
    """Models with experts may have other bits: each expert computes a varying number of rows even in windows.

    In tiny models this changes bits at only few positions.
    """
    counts = different(windowed(family, torch.bfloat16), ["mixed"])
    assert sum(counts.values()) < LENGTH


@pytest.fixture(scope="module")
def bundled() -> TorchBackend:
    return bundled_target()


def bundled_target(exact: str = "auto", num_slots: int = 4) -> TorchBackend:
    config = ModelConfig(BUNDLED_TARGET, dtype="bfloat16", num_slots=num_slots, sequence_length=256, num_threads=1)
    return load_torch_backend(replace(config, exact=exact))


def test_no_history_changes_a_bit_of_the_bundled_target(bundled: TorchBackend) -> None:
    assert set(different(bundled, ["mixed"]).values()) == {0}


def test_passes_as_they_come_change_bits_of_the_bundled_target() -> None:
    assert different(bundled_target("never"), ["lying"])["lying"] > 20


def windows_from_the_span(passes: WindowPasses, span: Span) -> Iterator[tuple[Span, range]]:
    """Cut a span into windows that begin where the span begins: a deliberate fault, which the check must find.

    Yields:
        (window as a span, rows of the window whose logits are wanted).
    """
    tokens, num_tokens, width = passes._token_ids[span.slot, span.start :], len(span.token_ids), passes._sizes.width
    tokens[:num_tokens] = span.token_ids
    for at in range(0, num_tokens, width):
        ids = tokens[at : at + width].tolist()
        wanted = range(max(0, num_tokens - span.num_logits - at), min(num_tokens - at, width))
        yield Span(span.slot, span.start + at, ids, len(ids)), wanted


def test_windows_that_begin_at_the_span_change_bits_of_the_bundled_target(
    bundled: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WindowPasses, "_windows", windows_from_the_span)
    assert different(bundled, ["lying"])["lying"] > 20


def rows_matter() -> bool:
    """Return whether, on this processor, a row of a matrix product depends on how many rows are multiplied."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 768, generator=generator).bfloat16() for size in (1024, 288))
    with torch.inference_mode():
        few, many = (torch.cat([linear(part, weight) for part in torch.split(rows, size)]) for size in (16, 64))
    return not torch.equal(few, many)


@pytest.mark.skipif(not rows_matter(), reason="this processor multiplies few rows as it does many")
def test_passes_whose_rows_vary_change_bits_of_the_bundled_target(
    bundled: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(bundled.passes, WindowPasses)
    inner = bundled.passes._inner
    assert isinstance(inner, EagerPasses)
    monkeypatch.setattr(inner, "_num_rows", 0)
    assert different(bundled, ["true"])["true"] > 0


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_tokens_of_the_bundled_target_keep_their_bits() -> None:
    backend, num_tokens = bundled_target(num_slots=8), 0
    for seed in range(1000):
        texts = texts_of(backend.vocab_size, num=12, length=200, num_shared=27, seed=seed)
        expected = read_whole(backend, texts)
        rng = np.random.default_rng(seed)
        drafts = DRAFTS[seed % len(DRAFTS)]
        found = History(backend, texts, rng, 27, drafts, beside=8).checksums()
        assert num_different(expected, found) == 0, seed
        if (num_tokens := num_tokens + len(found)) > 100_000:
            return
    raise AssertionError(f"{num_tokens} tokens in all texts")


def config_of(path: Path, **values: object) -> ModelConfig:
    return ModelConfig(path, sequence_length=64, num_threads=1, **values)  # type: ignore[arg-type]


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("exact", "dtype", "device", "num_slots", "num_windows"),
    [
        ("auto", torch.bfloat16, CPU, 8, 8),
        ("auto", torch.float16, CPU, 64, 16),
        ("auto", torch.float32, CPU, 8, 0),
        ("auto", torch.bfloat16, CUDA, 17, 16),
        ("auto", torch.bfloat16, CUDA, 18, 0),
        ("always", torch.bfloat16, CUDA, 64, 16),
        ("always", torch.float32, CPU, 2, 2),
        ("never", torch.bfloat16, CPU, 8, 0),
    ],
)
def test_the_flag_decides_by_dtype_device_and_slots(
    exact: str,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int,
    num_windows: int,
    models: ModelDirectories,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(models.target, exact=exact, num_slots=num_slots)
    windows = choose_windows(config, dtype, device, has_experts=False)
    assert (0 if windows is None else windows.num) == num_windows
    told = [record.levelname for record in caplog.records]
    assert told == (["INFO"] if num_windows else ["WARNING"] if device is CUDA else [])
    assert ("one token in 100 may depend on drafts" in caplog.text) == (told == ["WARNING"])


def test_a_model_with_experts_is_named_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_torch_backend(config_of(save_tiny_model(tmp_path, "mixtral"), dtype="bfloat16"))
    assert "has experts, whose rows no window fixes" in caplog.text


def test_the_name_of_the_arithmetic_has_the_windows(models: ModelDirectories) -> None:
    half = config_of(models.target, dtype="bfloat16")
    names = [
        load_torch_backend(replace(half, exact=exact, num_slots=slots)).arithmetic
        for exact, slots in (("auto", 8), ("always", 8), ("never", 8), ("auto", 2))
    ]
    assert names[0] == names[1] == "torch torch.bfloat16 cpu, 8 windows of 16"
    assert names[2] == "torch torch.bfloat16 cpu"
    assert len(set(names)) == 3


def test_passes_of_a_device_have_one_batch_and_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {}

    def made(model: object, *, fixed: FixedShapes | None, **_: object) -> TorchBackend:
        assert fixed is not None
        shapes["now"] = Shapes(fixed.buckets, num_slots=8, max_length=2048).all()
        raise SystemExit

    config = ModelConfig(BUNDLED_TARGET, dtype="bfloat16", sequence_length=256, num_threads=1)
    monkeypatch.setattr(pytorch_backend, "_fixed_shapes", lambda *_: FixedShapes(Uncompiled(), CAPTURED))
    monkeypatch.setattr(pytorch_backend, "TorchBackend", made)
    with pytest.raises(SystemExit):
        load_torch_backend(config)
    assert shapes["now"] == [Shape(8, 16, length) for length in (512, 1024, 2048)]
    assert len(Shapes(CAPTURED, num_slots=8, max_length=2048).all()) == 78


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_experts_are_found_in_a_configuration(family: str) -> None:
    assert has_experts(tiny_model(family).config) == (family in EXPERTS)
    assert {name for name in FAMILIES if has_experts(tiny_model(name).config)} == set(EXPERTS)
