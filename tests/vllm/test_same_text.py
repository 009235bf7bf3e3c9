"""Tests of the plug-in `vllm_same_text`: an engine of vLLM gives with speculation the same texts as without.

Engines are vLLM's own, each in a process of its own (`same_text_run.py`), on model runner V2 with Triton's kernels
interpreted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_same_text
from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from specdec.inference.vllm.hooks import installed
from tests.support.servers import until_healthy
from tests.vllm.conftest import INTERPRETED, Pair
from tests.vllm.heads import save_flat_target, save_head
from tests.vllm.same_text_run import AS_INSTALLED, MODES
from tests.vllm.test_stock import stock_server

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(tuple(map(int, installed().split(".")[:2])) < (0, 32), reason="the plug-in needs vLLM 0.32"),
]
SMALL: dict[str, Any] = {"names": ["greedy", "truncated", "penalties", "min_p"], "prompts": 2, "num_tokens": 12}
NUM_DRAFTS = 3


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the plug-in from its sources into a new folder, with pip; return the folder."""
    root = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "vllm_same_text", root / "source", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(root / "site"), str(root / "source")]
    code = os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-m", "pip", "install", *options)
    assert code == 0
    return root / "site"


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run of `same_text_run.py`, by mode of sampling.

    Each mode has its "texts", and counts of tokens and requests: "drafted", "accepted" and "preempted".
    """

    modes: Mapping[str, Mapping[str, Any]]

    @property
    def texts(self) -> dict[str, Any]:
        return {mode: each["texts"] for mode, each in self.modes.items()}

    def total(self, count: str) -> int:
        return sum(int(each[count]) for each in self.modes.values())

    def share(self, mode: str) -> float:
        """Return the share (0 to 1) of a mode's draft tokens that were accepted."""
        return float(self.modes[mode]["accepted"] / self.modes[mode]["drafted"])


async def run(pair: Pair, plugin: Path, *, env: Mapping[str, str] | None = None, **asked: Any) -> Run:
    """Run `same_text_run.py` with the tiny target and the arguments `asked`; return the result with the plug-in.

    `env` has further environment variables.
    """
    return (await runs(pair, plugin, env=env, **asked))[AS_INSTALLED]


async def runs(pair: Pair, plugin: Path, *, env: Mapping[str, str] | None = None, **asked: Any) -> dict[str, Run]:
    """Run `same_text_run.py` with the tiny target and the arguments `asked`; return the result of each variant.

    `env` has further environment variables.
    """
    site = {"PYTHONPATH": os.pathsep.join([str(plugin), INTERPRETED["PYTHONPATH"]]), "VLLM_PLUGINS": "same_text"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests" / "vllm" / "same_text_run.py")),
        json.dumps({"model": str(pair.target), **asked}),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **INTERPRETED, **site, **(env or {})},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return {name: Run(modes) for name, modes in json.loads(out.decode().splitlines()[-1]).items()}


def drafting(pair: Pair, **fields: Any) -> dict[str, Any]:
    """Return a speculative configuration of vLLM with the pair's draft model; `fields` change it."""
    return {"method": "draft_model", "model": str(pair.draft), "num_speculative_tokens": NUM_DRAFTS} | fields


@pytest.mark.release
async def test_a_seeded_text_is_that_without_speculation(pair: Pair, plugin: Path) -> None:
    """The installed plug-in is found by vLLM itself; with a draft model, drafts are accepted, and no text changes."""
    plain, drafted = await asyncio.gather(
        run(pair, plugin, **SMALL), run(pair, plugin, speculative=drafting(pair), **SMALL)
    )
    assert drafted.texts == plain.texts
    assert 0 < drafted.total("accepted") < drafted.total("drafted")


def test_this_vllm_has_every_name_that_the_rule_needs() -> None:
    assert list(vllm_same_text.unknown()) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "lost"),
    [
        ("gumbel.py", "is_drafting: bool,", "", "gumbel_sample(logits"),
        ("speculator.py", "def sample_draft(", "def draw_draft(", "DraftModelSpeculator.sample_draft(self"),
        ("rejection_sampler_utils.py", "    pos: torch.Tensor,\n", "", "rejection_sample(target_logits"),
        (
            "rejection_sampler.py",
            "    rejection_sample,\n",
            "    rejection_sample as other,\n",
            "rejection_sample() in",
        ),
        ("interface.py", "    pos: torch.Tensor\n", "", "LogitsContext(expanded_idx_mapping"),
    ],
)
def test_a_vllm_with_other_names_is_refused(
    file: str, old: str, new: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If vLLM lacks a name or parameter that the plug-in uses, speculation does not start, and the error names it."""
    place = vllm_same_text.place()
    assert place is not None
    for key in vllm_same_text.NAMES:
        copy = tmp_path / key.partition(":")[0]
        copy.parent.mkdir(parents=True, exist_ok=True)
        source = (place / key.partition(":")[0]).read_text("utf-8")
        assert copy.name != file or old in source
        copy.write_text(source.replace(old, new) if copy.name == file else source, "utf-8")
    monkeypatch.setattr(vllm_same_text, "place", lambda: tmp_path)
    vllm_same_text._bound.cache_clear()
    try:
        (missing,) = vllm_same_text.unknown()
        assert missing.startswith(lost)
        with pytest.raises(ValueError, match=r"does not know this vLLM.* or set SAME_TEXT=0"):
            vllm_same_text._adopt(configured())
    finally:
        vllm_same_text._bound.cache_clear()


def configured(**changes: Any) -> Any:
    """Return the parts of a vLLM configuration that the plug-in reads; it is valid unless `changes` break it."""
    fields = {"method": "eagle3", "rejection_sample_method": "standard", "draft_sample_method": "greedy"}
    fields |= {"use_local_argmax_reduction": False} | {name: changes[name] for name in fields if name in changes}
    config = {"use_v2_model_runner": True, "watermark_config": None, "speculative_config": SimpleNamespace(**fields)}
    config |= {"scheduler_config": SimpleNamespace(scheduler_cls=None)}
    return SimpleNamespace(**config | {name: changes[name] for name in config if name in changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_v2_model_runner": False, "method": "ngram"},
            r"'ngram' would run on vLLM's runner V1.*V2_MODEL_RUNNER=1",
        ),
        ({"rejection_sample_method": "block"}, "'block' must be 'standard'"),
        ({"rejection_sample_method": "synthetic"}, "'synthetic' must be 'standard'"),
        ({"watermark_config": object()}, "a watermark chooses tokens"),
    ],
    ids=["runner V1", "block", "synthetic", "watermark"],
)
def test_what_would_break_the_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_same_text._adopt(configured(**changes))


def test_settings_without_effect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert list(vllm_same_text.notes(configured())) == ["up to rounding of logits: VLLM_BATCH_INVARIANT=1 ends that"]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = configured(draft_sample_method="probabilistic")
    config.speculative_config.use_local_argmax_reduction = True
    first, *others = vllm_same_text.notes(config)
    assert first == "logits are batch-invariant"
    assert [note.split()[0] for note in others] == ["use_local_argmax_reduction", "draft_sample_method"]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the plug-in in this process, whose vLLM has model runner V1; undo its changes after the test."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    for place, name in (
        (EngineArgs, "create_engine_config"),
        (SamplingParams, "_validate_spec_decode"),
        (GPUModelRunner, "load_model"),
        (DraftModelSpeculator, "sample_draft"),
        (rejection_sampler, "rejection_sample"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    vllm_same_text.install.cache_clear()
    vllm_same_text.register()
    vllm_same_text.register()  # vLLM may load a plug-in twice


@pytest.mark.usefixtures("registered")
def test_runner_v1_is_refused_only_with_speculation(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    plain: dict[str, Any] = {"model": str(pair.target), "dtype": "float32", "max_model_len": 128}
    with caplog.at_level("INFO", logger="vllm.same_text"):
        EngineArgs(**plain).create_engine_config()
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(ValueError, match="'ngram' would run on vLLM's runner V1"):
        EngineArgs(**plain, speculative_config=ngram).create_engine_config()
    with pytest.raises(VLLMValidationError, match="min_p"):
        SamplingParams(min_p=0.1)._validate_spec_decode(ngram)


@pytest.mark.usefixtures("registered")
def test_it_stands_back_where_this_project_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(vllm_same_text.log, "info", lambda line, *given: said.append(line % given))
    ours = SimpleNamespace(scheduler_cls="specdec.inference.vllm.scheduler.DraftScheduler")
    for config in (
        configured(scheduler_config=ours, use_v2_model_runner=False),
        configured(speculative_config=None),
        configured(),
    ):
        vllm_same_text._adopt(config)
    assert [line.partition(":")[0] for line in said] == [
        "same_text stands back",
        "same_text stands back",
        "same_text",
    ]


@pytest.mark.usefixtures("registered")
def test_a_registered_process_has_the_whole_rule() -> None:
    """The registered plug-in replaces both vLLM's verification and its drawing of draft tokens, each only once."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    assert rejection_sampler.rejection_sample is vllm_same_text.choose
    assert DraftModelSpeculator.sample_draft is vllm_same_text.sample_draft
    assert GPUModelRunner.load_model.__closure__[0].cell_contents.__module__ == GPUModelRunner.__module__


def test_a_variable_leaves_vllm_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_engine_config
    monkeypatch.setenv("SAME_TEXT", "0")
    vllm_same_text.register()
    assert EngineArgs.create_engine_config is before


def test_the_distribution_brings_its_entry_point_and_nothing_else(plugin: Path) -> None:
    (found,) = distributions(path=[str(plugin)])
    assert found.metadata["Name"] == "vllm-same-text"
    assert not found.requires
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == ("vllm.general_plugins", "same_text", "vllm_same_text:register")
    assert (plugin / "vllm_same_text" / "__main__.py").is_file()


def test_the_path_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification and drafting run on torch's device "meta", where reading a value (`.tolist()`, `.item()`) fails."""
    import torch
    from vllm.v1.worker.gpu.sample import gumbel

    def sampled(logits: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    monkeypatch.setattr(gumbel, "gumbel_sample", sampled)
    with torch.device("meta"):
        rows = torch.empty(7, dtype=torch.int64)
        logits, ends, states = torch.empty(7, 32), torch.empty(3, dtype=torch.int32), torch.empty(4)
        tokens, counts = vllm_same_text.choose(logits, None, rows, ends, rows, rows, rows, rows, states, states, 3)
    assert (tokens.shape, tokens.dtype, counts.shape, counts.dtype) == ((2, 4), torch.int64, (2,), torch.int32)
    speculator = SimpleNamespace(
        compute_draft_logits=lambda *given: logits, _maybe_predict_acceptance=lambda *given: None, use_fp64_gumbel=False
    )
    drawn = vllm_same_text.sample_draft(speculator, logits, rows, rows, states, states, rows, None)
    assert (drawn.shape, drawn.device.type) == ((7,), "meta")


@pytest.mark.parametrize("read", ["tolist", "item"])
def test_a_planted_wait_for_the_device_is_noticed(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice code that reads a value from the device, and so waits for it."""
    import torch
    from vllm.v1.worker.gpu.sample import gumbel

    monkeypatch.setattr(gumbel, "gumbel_sample", lambda logits, *given, **named: getattr(logits[0, :1], read)())
    with torch.device("meta"):
        rows, logits, ends = torch.empty(7, dtype=torch.int64), torch.empty(7, 32), torch.empty(3, dtype=torch.int32)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        vllm_same_text.choose(logits, None, rows, ends, rows, rows, rows, rows, rows, rows, 3)


def test_draft_tokens_are_written_without_a_wait() -> None:
    """Writing draft workers' tokens to the device reads nothing from it, and so does not wait for it."""
    import torch

    from specdec.inference.vllm.runner_v2 import write_drafts

    states = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 2}, draft_tokens=torch.empty(3, 4, dtype=torch.int64, device="meta")
    )
    write_drafts(states, {"a": [5, 6, -1], "b": [7]})


@pytest.mark.parametrize("num_rows", [(1, 1), (4, 2), (1, 4)])
def test_exactly_the_equal_drafts_before_the_first_other_one_count(
    num_rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's number of new tokens is one more than its draft tokens before the first wrong one.

    A draft token is wrong if it differs from the target's own choice, as -1 always does. The test has two requests with
    several numbers of drafts.
    """
    import torch
    from vllm.v1.worker.gpu.sample import gumbel

    drawn = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17])[: sum(num_rows)]
    monkeypatch.setattr(gumbel, "gumbel_sample", lambda *given, **named: drawn)
    ends = torch.tensor([0, num_rows[0], sum(num_rows)], dtype=torch.int32)
    for wrong in range(sum(num_rows)):
        for bad in (-1, 99):
            drafts = torch.cat([torch.tensor([0]), drawn[:-1]])
            drafts[wrong] = bad
            others = (drawn, drawn, drawn, drawn, drawn, drawn)
            tokens, counts = vllm_same_text.choose(drawn, None, drafts, ends, *others, 3)
            for request, (start, end) in enumerate(pairwise(ends.tolist())):
                is_here = start < wrong < end
                assert counts[request] == (wrong - start if is_here else end - start)
                assert tokens[request, : end - start].tolist() == drawn[start:end].tolist()


async def test_prove_counts_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_same_text import __main__ as command

    right = [[1, 2, 3], [4, 5, 6]]
    answers = {"a": (right, 0.0), "b": (right, 7.0), "c": ([[1, 2, 3], [4, 9, 9]], 7.0)}
    monkeypatch.setattr(command, "texts", lambda url, num_tokens: answers[url])
    assert command.prove(["a", "b"], 3) is None
    assert command.prove(["a", "a"], 3) == "neither server has accepted a draft"
    assert command.prove(["a", "c"], 3) == "2 tokens differ"
    assert "2 of 6 tokens differ; accepted draft tokens: 0 and 7" in capsys.readouterr().out


def test_prove_names_the_reason_of_a_server() -> None:
    from vllm_same_text import __main__ as command

    with pytest.raises(SystemExit, match=f"http://127.0.0.1:{(port := free_port())}/v1/models: "):
        command.prove([f"http://127.0.0.1:{port}"] * 2, 3)


WAYS: Mapping[str, dict[str, Any]] = {
    "draft model": {},
    "unlimited drafts": {"env": {"SAME_TEXT_LIMITS": "0"}},
    "async": {"is_async": True},
    "few blocks": {"prompts": 8, "options": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 24}},
    "few blocks, async, five drafts": {
        "prompts": 8,
        "is_async": True,
        "options": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 48},
        "width": 5,
    },
    "one batch of all modes": {"mixed": True, "options": {"max_num_seqs": 12, "max_num_batched_tokens": 64}},
}
"""Ways to run an engine with the pair's draft model, by name: settings of the plug-in, of scheduling and of memory."""


@pytest.fixture(scope="module")
def wholes() -> dict[int, Any]:
    """Return a dictionary for the texts without speculation, by number of prompts, so that each is computed once."""
    return {}


async def without_speculation(wholes: dict[int, Any], pair: Pair, plugin: Path, num_prompts: int) -> Any:
    if num_prompts not in wholes:
        wholes[num_prompts] = (await run(pair, plugin, prompts=num_prompts)).texts
    return wholes[num_prompts]


@pytest.mark.release
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_the_same_text(way: str, pair: Pair, plugin: Path, wholes: dict[int, Any]) -> None:
    asked = dict(WAYS[way])
    spec = drafting(pair, num_speculative_tokens=asked.pop("width", NUM_DRAFTS))
    found = await run(pair, plugin, speculative=spec, **asked)
    assert found.texts == await without_speculation(wholes, pair, plugin, asked.get("prompts", 4))
    assert found.total("accepted") > 0
    assert found.total("preempted") > 0 or "few" not in way


@pytest.mark.release
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_a_random_head_changes_no_text(
    method: str, is_async: bool, pair: Pair, plugin: Path, tmp_path: Path
) -> None:
    """A random draft head changes no text; many of its drafts are accepted only if their position's numbers draw them.

    Drafts that are drawn with another position's random numbers are hardly ever accepted. The EAGLE-3 head knows half
    of the target's tokens.
    """
    target, head = save_flat_target(tmp_path / "target"), save_head(tmp_path / method, method)
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
    right = (await run(pair, plugin, model=str(target))).texts
    variants: dict[str, Any] = {"is_async": is_async, "variants": [AS_INSTALLED, "drafts one position off"]}
    late, early = (await runs(pair, plugin, model=str(target), speculative=speculative, **variants)).values()
    assert late.texts == right
    assert early.texts == right
    assert early.share("hot") < 0.05 < 0.1 < late.share("hot")


@pytest.mark.release
async def test_two_servers_prove_it_over_http(pair: Pair, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in's command `prove` finds equal texts at two servers with the plug-in, one of which speculates."""
    site = os.pathsep.join([str(plugin), INTERPRETED["PYTHONPATH"]])
    for name, value in {**INTERPRETED, "PYTHONPATH": site, "VLLM_PLUGINS": "same_text"}.items():
        monkeypatch.setenv(name, value)
    speculation = ("--speculative-config", json.dumps(drafting(pair)))
    async with stock_server(pair) as port, stock_server(pair, *speculation) as drafted:
        await until_healthy(port)
        await until_healthy(drafted)
        urls = [f"http://127.0.0.1:{each}" for each in (port, drafted)]
        proof = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm_same_text", "prove", *urls, "--tokens", "12"), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await proof.communicate()
    assert out.decode().startswith("0 of 288 tokens differ; accepted draft tokens: 0 and ")
    assert proof.returncode == 0


@pytest.mark.release
async def test_wrong_rules_are_noticed(pair: Pair, plugin: Path) -> None:
    """Each wrong way to draw or accept tokens changes a text; in the same engine, the plug-in's own changes none."""
    wrong = ["salt removed", "ratio with shared noise", "one position off", "drafts believed"]
    names = [mode for mode in MODES if not {"regex", "json"} & MODES[mode].keys()]
    asked: dict[str, Any] = {"names": names, "prompts": 4}
    right = (await run(pair, plugin, **asked)).texts
    spec = drafting(pair, draft_sample_method="probabilistic")
    found = await runs(pair, plugin, speculative=spec, variants=[AS_INSTALLED, *wrong], **asked)
    assert found[AS_INSTALLED].texts == right
    assert [variant for variant in wrong if found[variant].texts == right] == []
