"""Effect of `--compile` on backend torch; in most tests stand-ins for compilers leave the model as it is."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from specdec.inference.backends.pytorch import backend as torch_backend
from specdec.inference.backends.pytorch import graphs
from specdec.inference.backends.pytorch.backend import CAPTURED, TorchBackend, load_torch_backend
from specdec.inference.backends.pytorch.graphs import Run
from specdec.inference.backends.pytorch.static_pass import FixedShapes
from specdec.inference.backends.registry import has_fixed_slots
from specdec.inference.config import COMPILE_POLICIES, ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import GraphCounts, Span
from specdec.inference.observe.metrics import Metrics
from tests.support.backend_contract import Uncompiled
from tests.support.models import save_tiny_model
from tests.unit.backends.neuron.test_cli import run

SPAN = Span(1, 0, range(40), 1)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace compilers by stand-ins that compile nothing; return a list to which each stand-in's name is added."""
    asked: list[str] = []

    def compiler(name: str, **_: object) -> Uncompiled:
        asked.append(name)
        return Uncompiled()

    monkeypatch.setattr(torch_backend, "Compiled", compiler)
    return asked


class Failing(Uncompiled):
    def make(self, run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")


def config(tmp_path: Path, policy: str, **fields: str) -> ModelConfig:
    path = tmp_path if (tmp_path / "config.json").is_file() else save_tiny_model(tmp_path, "llama")
    kind: dict[str, str] = {"device": "cpu", "backend": "torch", **fields}
    return ModelConfig(path, num_slots=2, num_threads=1, compile_policy=policy, **kind)  # type: ignore[arg-type]


def test_every_policy_gives_the_same_logits(tmp_path: Path, uncompiled: list[str]) -> None:
    loaded = {policy: load_torch_backend(config(tmp_path, policy)) for policy in COMPILE_POLICIES}
    assert uncompiled == ["inductor", "inductor"]  # always, only
    assert loaded["auto"].graphs == loaded["never"].graphs == GraphCounts(0, 0)
    expected = loaded["never"].forward([SPAN])
    for backend in loaded.values():
        num_graphs = backend.graphs.num
        np.testing.assert_allclose(backend.forward([SPAN]), expected, rtol=0, atol=1e-4)
        assert backend.graphs == GraphCounts(num_graphs, 0)


def test_auto_falls_back_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `--compile auto`, passes run uncompiled, with a warning in the log, if CUDA graphs cannot be captured.

    Capturing fails for layers that need a result from the device in the middle of a pass.
    """
    monkeypatch.setattr(torch_backend, "_fixed_shapes", lambda *_: FixedShapes(Failing(), CAPTURED))
    backend = load_torch_backend(config(tmp_path, "auto"))
    assert backend.forward([SPAN]).shape == (1, backend.vocab_size)
    [line] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "not permitted when stream is capturing; they run operator by operator" in line


def test_always_never_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_fixed_shapes", lambda *_: FixedShapes(Failing(), CAPTURED))
    with pytest.raises(ConfigError, match=r"cannot be left as they are: operation not permitted .* --compile never"):
        load_torch_backend(config(tmp_path, "always"))


def test_only_compiles_and_ends(tmp_path: Path, uncompiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--model", save_tiny_model(tmp_path, "llama"), "--backend", "torch", "--device", "cpu", "--prompt", "7")
    with caplog.at_level(logging.INFO):
        assert run("verify_target", *flags, "--compile", "only") == 0
    assert uncompiled == ["inductor"]
    assert "compiled code is kept in" in caplog.text
    assert "0 passes" not in caplog.text
    assert "everything is compiled" in caplog.text


def test_backends_without_a_compiler_refuse_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", save_tiny_model(tmp_path, "llama"), "--backend", "onnx", "--prompt", "7")
    assert run("verify_target", *flags, "--compile", "always") == 2
    assert "backend onnx takes neither" in capsys.readouterr().err


def test_compiled_models_have_no_spare_slots(tmp_path: Path) -> None:
    """With `--compile always` or `only` a model has only the slots of --batch, since its shapes depend on them."""
    fixed = [policy for policy in COMPILE_POLICIES if has_fixed_slots(config(tmp_path, policy))]
    assert fixed == ["always", "only"]


def test_metrics_count_graphs(tmp_path: Path, uncompiled: list[str]) -> None:
    backend, metrics = load_torch_backend(config(tmp_path, "always")), Metrics("tiny")
    metrics.watch_graphs([backend, None])
    backend.forward([SPAN])
    exposition = metrics.exposition().decode()
    assert f'specdec_graphs{{model_name="tiny"}} {float(backend.graphs.num)}' in exposition
    assert 'specdec_late_graphs{model_name="tiny"} 0.0' in exposition


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_inductor_compiles_what_a_server_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    checkpoint = save_tiny_model(tmp_path / "model", "gpt2")
    plain = load_torch_backend(ModelConfig(checkpoint, num_slots=2, num_threads=1, device="cpu"))
    compiled = load_torch_backend(
        ModelConfig(checkpoint, num_slots=2, num_threads=1, device="cpu", compile_policy="always")
    )
    assert isinstance(compiled, TorchBackend)
    assert list((tmp_path / "inductor").iterdir())
    np.testing.assert_allclose(compiled.forward([SPAN]), plain.forward([SPAN]), rtol=0, atol=1e-4)
    assert compiled.graphs.num_late == 0


def test_compiling_needs_a_torch_with_a_cache_for_each_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--compile` with a torch that is too old is refused; the error names the version that it needs.

    Regression: `torch.compile` of torch 2.9 lacks an argument that this project passes, so loading raised
    TypeError.
    """
    monkeypatch.setattr(graphs, "_compile", lambda run, *, backend, fullgraph, dynamic: run)
    with pytest.raises(ConfigError, match=r"torch 2\.13 or later.*--compile never"):
        load_torch_backend(ModelConfig(save_tiny_model(tmp_path, "llama"), compile_policy="always"))
