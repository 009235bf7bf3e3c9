"""`--compile` compiles the models that a role loads; models that other programs compiled are loaded if they fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.neuron import environment
from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.neuron.storage import foreign
from specdec.inference.cli.prompts import topologies
from specdec.inference.config import ConnectionConfig, FusedConfig, ModelConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.errors import ConfigError
from specdec.inference.serving import target
from specdec.inference.serving.assembly import load_proposer, target_engine
from specdec.inference.serving.edge import Drafting
from tests.conftest import ModelDirectories
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.unit.backends.neuron.test_cli import COMMON, run

PAIR = ("--target_model", "TARGET", "--draft_model", "DRAFT")
ALONE = ("--model", "TARGET")
PROMPT = ("--prompt", "7", "--max_new_tokens", "1")
VANILLA, ON_DEVICE = ("--speculation_method", "vanilla"), ("--device_sampling",)
ROLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], int]] = {
    # a name: the role, its flags, those of --role compile, flags of both, how many models
    "target": ("target", ALONE, ALONE, (), 1),
    "target of another gamma": ("target", ALONE, ("--target_model", "TARGET"), ("--gamma", "2"), 1),
    "target, device sampling": ("target", ALONE, ALONE, ON_DEVICE, 1),
    "verify_target": ("verify_target", (*ALONE, *PROMPT), (*ALONE, "--gamma", "0"), (), 1),
    "verify_target, device sampling": ("verify_target", (*ALONE, *PROMPT), ALONE, ON_DEVICE, 1),
    "verify_draft": ("verify_draft", ("--model", "DRAFT", *PROMPT), ("--model", "DRAFT", "--gamma", "0"), (), 1),
    "verify_fused": ("verify_fused", (*PAIR, *PROMPT), PAIR, (), 1),
    "draft": ("draft", ("--model", "DRAFT", *PROMPT), ("--draft_model", "DRAFT"), (), 1),
    "fused_target": ("fused_target", PAIR, PAIR, (), 1),
    "fused_target of another width": ("fused_target", PAIR, PAIR, ("--speculation_length", "3"), 1),
    "fused_target, device sampling": ("fused_target", PAIR, PAIR, ON_DEVICE, 1),
    "fused_target, vanilla": ("fused_target", PAIR, PAIR, VANILLA, 2),
}
WAYS = [
    *((name, "--role compile") for name in ROLES),
    *((name, "--compile only") for name in ("target", "verify_fused", "draft", "fused_target, vanilla")),
]


@pytest.fixture(autouse=True)
def _servers_end_when_they_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve_target(config: ModelConfig | FusedConfig, *_: Any) -> None:
        async with target_engine(config, EngineLimits(1)):
            pass

    async def run_edge(_: object, __: ConnectionConfig, drafting: Drafting) -> int:
        await load_proposer(drafting.proposer)
        return 0

    monkeypatch.setattr(target, "serve_target", serve_target)
    monkeypatch.setattr(topologies, "run_edge", run_edge)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_role_loads_the_models_compiled_ahead(
    models: ModelDirectories, artifacts: Path, compiled_in: list[str], name: str, way: str
) -> None:
    role, own, of_compile, both, num_models = ROLES[name]
    paths = {"TARGET": models.target, "DRAFT": models.related}
    own, of_compile = (tuple(str(paths.get(flag, flag)) for flag in flags) for flags in (own, of_compile))
    assert run(role, *own, *both, *COMMON, "--compile", "never") == 2, "nothing is compiled yet"
    if way == "--compile only":
        assert run(role, *own, *both, *COMMON, "--compile", "only") == 0
    else:
        assert run("compile", *of_compile, *both, *COMMON) == 0
    assert len(list(artifacts.glob("*/*/specdec.json"))) == len(compiled_in) == num_models
    assert run(role, *own, *both, *COMMON, "--compile", "never") == 0
    assert len(compiled_in) == num_models


def test_never_names_the_differences(
    models: ModelDirectories, artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("compile", "--model", models.target, *COMMON) == 0
    flags = ("--model", models.target, *COMMON, "--compile", "never")
    assert run("compile", *flags, "--gamma", "2", "--neuron_config", '{"fused_qkv": true}') == 2
    said = capsys.readouterr().err
    assert "neuron_config.fused_qkv unset there, True asked; neuron_config.speculation_length 9 there, 3 asked" in said
    assert run("compile", *flags) == 0


def test_other_backends_compile_nothing(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify_target", "--model", models.target, *PROMPT, "--compile", "only") == 2
    assert "backend auto takes neither" in capsys.readouterr().err
    lookup = ("--draft_model", "ngram", "--tokenizer", models.target, "--backend", "neuron", *PROMPT)
    assert run("draft", *lookup, "--compile", "only") == 2
    assert "nothing to compile" in capsys.readouterr().err


def compiled_elsewhere(folder: Path, artifacts: Path, **options: Any) -> Path:
    """Compile a model and copy it to `folder` as another program leaves it: without this project's specdec.json.

    Args:
        folder: the copy; must not exist yet, and is returned.
        artifacts: the store of the test, still empty; the model is compiled into it.
        options: as of `neuron_config`.
    """
    load_neuron_backend(neuron_config(checkpoint("llama"), gamma=0, **options))
    (made,) = artifacts.glob("*/*")
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("specdec.json", "started.json"))
    return folder


def test_a_foreign_compiled_model_is_loaded_if_it_fits(
    artifacts: Path, tmp_path: Path, compiled_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that another program compiled is loaded if its shapes are the ones asked for.

    Regression: if the path of the store of compiled models was that of such a model, the model was taken for an
    empty store, and compiled again.
    """
    folder = compiled_elsewhere(tmp_path / "vllm", artifacts)
    settings = json.loads((folder / "neuron_config.json").read_text())
    added = {"_name_or_path": "elsewhere", "transformers_version": "4.40", "of_a_later_version": 1}
    (folder / "neuron_config.json").write_text(json.dumps({**settings, **added}))
    assert foreign.is_compiled_model(folder)
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(folder))
    load_neuron_backend(neuron_config(checkpoint("llama"), gamma=0))
    assert len(compiled_in) == 1
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=r"not for these settings: .*neuron_config.batch_size 3 there, 2 asked"):
        load_neuron_backend(neuron_config(checkpoint("llama"), gamma=0, num_slots=2))
    with pytest.raises(ConfigError, match="model_type llama there, qwen3 asked"):
        load_neuron_backend(neuron_config(checkpoint("qwen3"), gamma=0))
    with pytest.raises(ConfigError, match="lacks a graph that vanilla needs and this project alone makes"):
        load_neuron_backend(neuron_config(checkpoint("llama"), gamma=3))
    assert sorted(folder.rglob("*")) == before


def test_an_unreadable_compiled_model_of_another_program_is_refused(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiled_elsewhere(tmp_path / "vllm", artifacts)
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(folder))
    for text, message in (("{", "cannot be read"), ("[]", "does not hold a JSON object")):
        (folder / "neuron_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"neuron_config.json {message}"):
            load_neuron_backend(neuron_config(checkpoint("llama"), gamma=0))


def test_artifacts_are_listed_verified_and_cleaned(
    models: ModelDirectories, artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("compile", "--model", models.target, *COMMON) == 0
    (taken,) = artifacts.glob("*/*")
    unfinished, twin = taken.with_name("000000000000"), taken.with_name("ffffffffffff")
    shutil.copytree(taken, twin)
    shutil.copytree(taken, unfinished, ignore=shutil.ignore_patterns("specdec.json"))
    capsys.readouterr()
    where = ("--compiled_model_path", artifacts)
    assert run("artifacts", "ls", *where) == 0
    listed = capsys.readouterr().out
    assert f"{unfinished}  not finished, begun 2" in listed
    assert f"  {models.target}\n" in listed
    assert listed.count("\n    neuron_config.speculation_length 9\n") == 2
    assert run("artifacts", "verify", *where) == 0
    (twin / "model.pt").write_bytes(bytes(len((twin / "model.pt").read_bytes())))
    capsys.readouterr()
    assert run("artifacts", "verify", *where) == 1
    assert f"{twin}  model.pt has another content than was published" in capsys.readouterr().out
    assert run("artifacts", "clean", *where) == 0
    assert unfinished.exists(), "it may be on its way"
    assert run("artifacts", "clean", *where, "--older_than_h", "0") == 0
    assert list(artifacts.glob("*/*")) == [taken]
    assert run("artifacts", "ls", "--compiled_model_path", artifacts / "not there") == 2


def test_a_store_is_ready_for_the_versions_that_compiled_it(
    models: ModelDirectories, artifacts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store counts as ready only for the versions, of this project and of Neuron's SDK, that compiled its models.

    Regression: a pod's init container accepted a specdec.json of any version, so after an upgrade the server
    crashed in a loop.
    """
    ready = ("artifacts", "ready", "--compiled_model_path", artifacts)
    artifacts.mkdir(exist_ok=True)
    assert run(*ready) == 1
    assert run("compile", "--model", models.target, *COMMON) == 0
    assert run(*ready) == 0
    monkeypatch.setattr(environment, "FORMAT", environment.FORMAT + 1)
    capsys.readouterr()
    assert run(*ready) == 1
    assert f"  format {environment.FORMAT - 1} there, {environment.FORMAT} asked\n" in capsys.readouterr().out
    assert run("compile", "--model", models.target, *COMMON) == 0
    assert run(*ready) == 0


def test_artifacts_clean_reports_a_store_without_deletion(
    models: ModelDirectories, artifacts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.mountpoint import Mountpoint

    assert run("compile", "--model", models.target, *COMMON) == 0
    (taken,) = artifacts.glob("*/*")
    shutil.copytree(taken, taken.with_name("ffffffffffff"))
    Mountpoint(artifacts).mount(monkeypatch)
    assert run("artifacts", "clean", "--compiled_model_path", artifacts, "--older_than_h", "0") == 1
    assert "this store deletes nothing" in capsys.readouterr().out
