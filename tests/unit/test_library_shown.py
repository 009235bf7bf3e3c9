"""What a notebook shows of the library: objects in one line, a progress bar for lists, short tracebacks, no warning."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Generator
from typing import Any, cast

import pytest

import specdec
from specdec.errors import ConfigError
from specdec.inference.observe.stats import RequestStats
from specdec.testing import ScriptedCompleter, serving


@pytest.fixture(scope="module")
def client() -> Generator[specdec.Client, None, None]:
    with serving(ScriptedCompleter([["a", "b"]])) as served, specdec.Client(served.address) as client:
        yield client


def test_objects_are_a_line(client: specdec.Client) -> None:
    assert repr(client).startswith("Client(127.0.0.1:")
    (result,) = client.generate("x")
    for each in (client, result, result.stats):
        assert "\n" not in repr(each)
        assert "Timings" not in repr(each)
    assert repr(specdec.AsyncLLM()).endswith(", not open)")
    assert len(repr(RequestStats())) < 500


def test_several_prompts_have_a_bar_where_somebody_looks(
    client: specdec.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.generate(["x", "y"])
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "ipykernel", cast(Any, object()))
    client.generate("x")
    assert capsys.readouterr().err == ""
    client.generate(["x", "y"])
    assert "2/2" in capsys.readouterr().err


def test_errors_of_a_user_have_few_frames(client: specdec.Client) -> None:
    """When a call of the library has a wrong argument, the traceback has few frames, without the library's inner ones.

    Regression: a misspelt parameter gave 11 frames, and a missing model 55, with its causes.
    """
    wrong: Any = {"max_new_token": 5}
    with pytest.raises(ConfigError) as typo:
        client.generate("x", **wrong)
    with pytest.raises(ConfigError) as missing:
        specdec.LLM("/no/such/model", "none")
    with pytest.raises(ConfigError) as setting:
        specdec.LLM(tree=5)  # type: ignore[call-arg]
    for caught in (typo, missing, setting):
        assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
        assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 15
    assert "no-" not in str(setting.value)


def test_a_notebook_without_widgets_sees_no_warning() -> None:
    """A notebook without ipywidgets shows no warning that they are missing.

    Regression: tqdm gave this warning wherever the progress bars of the model hub were imported in a notebook.
    """
    lines = (
        "import sys, types",
        "sys.modules['ipykernel.zmqshell'] = types.ModuleType('ipykernel.zmqshell')",
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=object)",
        "sys.modules['ipywidgets'] = None",
        "QUIET",
        "import tqdm.auto",
    )
    for quiet, is_warned in (("", True), ("from specdec.library import _quiet_bars; _quiet_bars()", False)):
        script = "\n".join(lines).replace("QUIET", quiet)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
        assert ("IProgress" in done.stderr) is is_warned, done.stderr
