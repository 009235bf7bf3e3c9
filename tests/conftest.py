"""Fixtures that all tests share: tiny models, saved once per pytest process."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from tests.support.nxdi import cpu_mode, nxdi, on_double, on_real, pytest_addoption, pytest_configure  # noqa: F401

# Packed weights of models that live as long as a test belong neither into the user's cache nor into the next run's.
_CACHE = tempfile.mkdtemp(prefix="specdec-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE

HAS_TORCH = find_spec("torch") is not None
"""True if torch is installed; `make test-python` also has environments without torch."""

NEVER = 100_000
"""An end-of-sequence id outside the vocabulary: a model with it generates to the end of its context."""


@dataclass(frozen=True)
class ModelDirectories:
    """Directories of the tiny models, each with a tokenizer.

    Attributes:
        target: the target model.
        chat_target: the target model with a chat template.
        related: the target with slightly changed weights; as a draft, a part of its tokens is accepted.
        stranger: a model of another architecture with random weights; as a draft, hardly any of its tokens is accepted.
        permuted: the target's weights, with a tokenizer that has the same tokens under other ids.
        endless: a target with a context of 8192 tokens, whose texts have no end-of-sequence token.
    """

    target: Path
    chat_target: Path
    related: Path
    stranger: Path
    permuted: Path
    endless: Path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn Python's garbage collection off while pytest collects tests, since nearly all that it loads stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip test files whose import fails for lack of torch."""
    report = yield
    if not HAS_TORCH and report.failed and "No module named 'torch'" in report.longreprtext:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "Skipped: it needs torch")
    return report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectories:
    pytest.importorskip("torch", exc_type=ModuleNotFoundError)

    from specdec.inference.backends.onnx.packed import packed_decoder
    from tests.support.models import CHAT_TEMPLATE, save_tiny_model

    root = tmp_path_factory.mktemp("models")
    directories = ModelDirectories(
        target=save_tiny_model(root / "target", "llama", seed=1),
        chat_target=save_tiny_model(root / "chat" / "target", "llama", seed=1, chat_template=CHAT_TEMPLATE),
        related=_save_related(root / "related"),
        stranger=save_tiny_model(root / "stranger", "qwen2", seed=2, hidden_size=16, num_hidden_layers=1),
        permuted=save_tiny_model(root / "permuted", "llama", seed=1, tokenizer_variant="permuted"),
        endless=save_tiny_model(
            root / "endless", "llama", seed=1, max_position_embeddings=8192, eos_token_id=NEVER, bos_token_id=0
        ),
    )
    for directory in vars(directories).values():
        packed_decoder(directory, "float32", None)  # a server would import torch and Transformers to do it
    return directories


def _save_related(directory: Path) -> Path:
    from tests.support.models import disturbed, tiny_model, tiny_tokenizer

    disturbed(tiny_model("llama", seed=1)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Set torch's number of threads to one before each test.

    Loading a model sets this number for the whole process. Over tiny matrices, beside other tests, two threads take
    ten times as long as one.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_a_modules_own() -> Generator[None, None, None]:
    """Collect garbage after each test module, but only objects made by it; searching older ones would take a second."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _bundled_models_are_packed_once() -> None:
    """Keep the converted weights of the bundled models in build/, where all processes and later test runs find them.

    A server that has to convert them itself, for ONNX Runtime, needs five seconds of CPU more to start.
    """
    if not (HAS_TORCH and find_spec("onnxruntime")):
        return
    from specdec.inference.backends.onnx.packed import folder_of
    from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT

    for path, dtype in product((BUNDLED_TARGET, BUNDLED_DRAFT), ("float32", "int8")):
        place = folder_of(path, dtype).parent
        kept = ROOT / "build" / "cache" / place.relative_to(_CACHE)
        kept.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(kept)


@pytest.fixture(scope="session", autouse=True)
def _modules_exist_once() -> Generator[None, None, None]:
    """Fail if a test imported `inference`, `grpc_comm` or `comparison` without `specdec.`, and so made a copy."""
    yield
    assert {name.split(".")[0] for name in sys.modules} & {"inference", "grpc_comm", "comparison"} == set()
