"""`specdec doctor` predicts what loading a model will do, and how fast it can be at most."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from specdec.inference.cli.app import main
from specdec.inference.cli.roles.doctor import bound
from specdec.inference.cli.roles.registry import settings_of
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.observe import host_load
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model


def test_the_bundled_pair_has_a_command_that_serves_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(BUNDLED_TARGET), str(BUNDLED_DRAFT), "--batch", "3", "--dtype", "int8"]
    assert main(["--role", "doctor", *arguments]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[0] != " "}
    assert lines.keys() - {"busy"} == {"target", "draft", "pair", "memory", "speed", "serve"}
    program, role, *flags = shlex.split(lines["serve"].removeprefix("serve").strip())
    served = settings_of(role, flags)
    assert (program, served.models.target, served.models.draft) == ("specdec", BUNDLED_TARGET, str(BUNDLED_DRAFT))
    assert (served.models.loading.num_slots, served.models.loading.dtype) == (3, "int8")
    assert "13 million parameters" in lines["target"]


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_least_time_of_a_pass_is_no_bound_on_a_busy_machine(
    is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimates of speed that `specdec doctor` prints are called limits only if the machine is quiet.

    Regression: on a busy machine it promised at most 30 tokens/s, and the first run had 116. It had timed reading
    256 MB of memory, while small models' weights stay in the CPU's cache, and did not mention other processes.
    """
    monkeypatch.setattr(host_load, "_CPU_TIMES", tmp_path / "unknown")  # so that the load average decides
    monkeypatch.setattr(host_load, "load_average", lambda: 99.0 if is_busy else 0.0)
    command = ["--role", "doctor", str(BUNDLED_TARGET), str(BUNDLED_DRAFT)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert ("The machine was busy: load average 99.0" in shown) is is_busy
    words = ("or less", "or more") if is_busy else ("at least", "at most")
    assert re.search(rf"a target pass takes \d+\.\d ms {words[0]}, one stream has \d+ tokens/s {words[1]}, w", shown)
    measure = "specdec compare --target_model {} --draft_model {}".format(*command[2:])
    assert f"`{measure}` measures it" in shown


def test_a_draft_of_another_tokenizer_fits_by_its_share(
    models: ModelDirectories, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--role", "doctor", str(models.target), str(models.permuted)]) == 0
    assert "two tokenizers: the draft fits" in capsys.readouterr().out
    assert main(["--role", "doctor", str(BUNDLED_TARGET), str(models.related)]) == 1
    assert "pair    the draft does NOT fit: the draft can propose" in capsys.readouterr().out


def test_every_fault_is_shown_in_the_words_of_the_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`specdec doctor` reports, for each model that cannot be served, the error with which a server would end."""
    (tmp_path / "target").mkdir()
    target, draft = save_tiny_model(tmp_path / "target", "llama"), tmp_path / "draft.gguf"
    stored = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**stored, "quantization_config": {"quant_method": "awq"}}))
    draft.touch()
    assert main(["--role", "doctor", str(target), str(draft)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["target  NOT served", "draft   NOT served"]
    for line, path in zip(shown, (target, draft), strict=True):
        assert main(["--role", "verify_target", "--model", str(path), "--prompt", "x"]) == 2
        assert capsys.readouterr().err == f"error: {line.partition(': ')[2]}\n"


def test_the_bound_of_speed_is_leviathans() -> None:
    """Doctor's highest possible speed-up is the formula of Leviathan et al., with the best number of draft tokens.

    At an acceptance of 0.5 a draft that takes no time gives at most 2; a draft as slow as its target gives no gain.
    """
    assert bound(0.5, 0.0) == pytest.approx(2.0)
    assert bound(0.9, 1.0) == 1.0
    assert bound(0.8, 0.1) == pytest.approx(max((1 - 0.8 ** (g + 1)) / 0.2 / (1 + 0.1 * g) for g in range(65)))
