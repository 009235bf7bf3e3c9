"""Command line of compare_architectures.py, and its conversion to a `ComparisonConfig`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from specdec.comparison.plan.backend import BackendConfig
from specdec.comparison.plan.config import (
    ARRIVALS,
    STARTED,
    ComparisonConfig,
    NetworkConfig,
    PromptSet,
    Topology,
    WorkloadConfig,
    mixed,
)
from specdec.comparison.plan.datasets import read_dataset
from specdec.comparison.plan.endpoint import endpoint_of
from specdec.comparison.plan.lengths import Characters, Tokens, draw_lengths, prompts_of_lengths
from specdec.comparison.plan.lists import list_of, one_of, one_or_two, seconds_of, time_of
from specdec.comparison.plan.slo import FIGURES, Slo, parse_slo
from specdec.inference.cli.config_file import ConfigFileParser, as_toml, program
from specdec.inference.cli.flags import add_group
from specdec.inference.config import (
    ALWAYS,
    BUNDLED_PROMPTS,
    BUNDLED_TARGET,
    DEFAULT_BRANCHES,
    DEFAULT_GAMMA,
    DialSecurity,
    ServerConfig,
)
from specdec.inference.declared import read
from specdec.inference.errors import ConfigError
from specdec.inference.request import Schedule
from specdec.inference.serving.hub import is_hub_id, model_directory
from specdec.inference.serving.models import draft_beside
from specdec.inference.settings import Range, group, same, setting

BUNDLED_PROMPT_FILES = tuple(BUNDLED_PROMPTS.with_name(f"{kind}.txt") for kind in ("structured", "open_ended"))
NUM_BUNDLED_PROMPTS = 3
"""Prompts of each kind: few enough for a run without arguments to take under four minutes on two cores."""
RANDOM = "random"
"""Name of the dataset of random prompts, which needs no file."""

ENDPOINTS = "endpoints (servers that are already running)"
MACHINES = "machines (a machine is a set of CPU cores of this host)"
OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Flags of the comparison.

    Attributes:
        target_model: target model directory.
        draft_models: draft model directories; ngram is prompt lookup without a model (default for the bundled target:
            the bundled draft).
        gammas: draft tokens per round; several values are a sweep.
        schedules: those of topology distributed: sync (rounds), async (the draft runs ahead), load (either, by load).
        branches: maximum number of branches beside the chain of a draft that runs ahead; 0 is none.
        endpoints: server to measure: grpc://HOST:PORT of this project, or http(s)://HOST:PORT/v1 of any
            OpenAI-compatible server; may be repeated; ,tls_ca=FILE,token_file=FILE after it are its own flags.
        equal_weights: all endpoints have the same weights, so that greedy answers must be the same.
        datasets: prompts: a text file with one per line, .jsonl of chats, .json of ShareGPT, or random; may be
            repeated (default: prompts/structured.txt and prompts/open_ended.txt).
        input_tokens: normally distributed lengths of prompts, to which texts are cut or joined.
        tokenizer: model directory with the tokenizer that counts --input_tokens (default: --target_model; with
            endpoints alone, 4 characters are a token).
        cores_per_machine: cores, and threads of a model, on each machine; 0 puts all machines on one core.
        workers: draft workers of topology pool; several numbers only with --capacity.
        capacity: instead of comparing, search for the most streams within --slo, up to this number (64 without one).
        one_at_a_time: start, measure and stop one contender after the other, for a host too small for all at once.
        output: directory for results.csv, results.json, report.html and the plots.
        page: Markdown page; this command writes its part from <!-- bench: NAME --> to <!-- /bench -->.
        llmperf: also write LLMPerf's two JSON files for each measurement, into DIR/llmperf.
    """

    SECTION: ClassVar = "what is compared"

    topologies: tuple[Topology, ...] | None = setting(
        None,
        "--topologies LIST",
        help=f"any of {','.join(topology.value for topology in STARTED)}; with --endpoint, only those named here "
        "(default: all)",
        kind=list_of(one_of("topology", STARTED)),
    )
    target_model: Path = setting(BUNDLED_TARGET, "--target_model DIR")
    draft_models: tuple[str, ...] | None = setting(None, "--draft_models LIST", kind=list_of(str))
    gammas: tuple[int, ...] = setting((DEFAULT_GAMMA,), "--gamma LIST", kind=list_of(int))
    schedules: tuple[Schedule, ...] = setting(
        (Schedule.SYNC, Schedule.ASYNC), "--schedule LIST", kind=list_of(one_of("schedule", Schedule))
    )
    branches: tuple[int, ...] = setting((DEFAULT_BRANCHES,), "--branches LIST", kind=list_of(int))
    workers: tuple[int, ...] = setting((1,), "--workers LIST", kind=list_of(int))
    drafting: str = same(
        ServerConfig, "drafting", default=ALWAYS, help="when the started servers draft: always, never, or while it pays"
    )
    capacity: int | None = setting(None, "--capacity STREAMS", bare=64, within=Range(2, 4096))
    budget: str = setting(
        "10m",
        "--budget TIME",
        help="wall time of --capacity or of a study, with the start of servers, such as 90s, 10m, 1h",
        kind=time_of,
    )
    endpoints: tuple[str, ...] | None = setting(None, "--endpoint NAME=URL", section=ENDPOINTS)
    equal_weights: bool = setting(False, "--equal_weights", section=ENDPOINTS)
    security: DialSecurity = group(DialSecurity)
    datasets: tuple[str, ...] | None = setting(None, "--dataset --prompt_file FILE", section=WorkloadConfig.SECTION)
    input_tokens: tuple[float, ...] | None = setting(
        None, "--input_tokens MEAN,STDDEV", kind=one_or_two("MEAN or MEAN,STDDEV"), section=WorkloadConfig.SECTION
    )
    tokenizer: Path | None = setting(None, "--tokenizer DIR", section=WorkloadConfig.SECTION)
    num_prompts: int | None = setting(
        None,
        "--num_prompts N",
        help=f"prompts of each kind (default: all of a --dataset file, else {NUM_BUNDLED_PROMPTS})",
        section=WorkloadConfig.SECTION,
        within=Range(1),
    )
    workload: WorkloadConfig = group(WorkloadConfig)
    slo: str | None = setting(
        None,
        "--slo LIMITS",
        help=f"limits of answers that count as goodput, on {', '.join(FIGURES)}, such as ttft:200ms,itl:50ms",
        section=ARRIVALS,
    )
    rtts_ms: tuple[float, ...] | None = same(NetworkConfig, "rtts_ms", default=None, section=NetworkConfig.SECTION)
    network: NetworkConfig = group(NetworkConfig, without=("rtt_ms",))
    cores_per_machine: int = setting(1, "--cores_per_machine N", section=MACHINES)
    one_at_a_time: bool = setting(False, "--one_at_a_time", section=MACHINES)
    backend: BackendConfig = group(BackendConfig)
    output: Path = setting(Path("reports/comparison"), "--output DIR", section=OUTPUT)
    llmperf: bool = setting(False, "--llmperf", section=OUTPUT)
    page: str | None = setting(None, "--page FILE#NAME", section=OUTPUT)

    def config(self, asked: str) -> ComparisonConfig:
        """Return the configuration that these flags describe; raise ConfigError if they cannot be used together.

        ConfigError is also raised if a file cannot be read.

        Args:
            asked: all flags in the format of a --config file.
        """
        slo = parse_slo(self.slo) if self.slo else Slo()
        workload = replace(self.workload, prompt_sets=self._prompt_sets(), slo=slo)
        if self.capacity is not None:
            if self.workload.concurrencies != (1,):
                raise ConfigError("concurrency: --capacity searches for it")
            workload = replace(workload, prompt_sets=(mixed(workload.prompt_sets),), concurrencies=(self.capacity,))
        rtts_ms = self.rtts_ms or ((0.0,) if self.endpoints else self.network.rtts_ms)
        return ComparisonConfig(
            target_model=_local(self.target_model),
            draft_models=tuple(str(_local(Path(draft))) for draft in self.drafts()),
            topologies=self._started(),
            gammas=self.gammas,
            schedules=self.schedules,
            branches=self.branches,
            network=replace(self.network, rtts_ms=rtts_ms),
            workload=workload,
            workers=self.workers,
            capacity=self.capacity,
            budget_s=seconds_of(self.budget),
            page=self.page,
            usable_cores=tuple(sorted(os.sched_getaffinity(0))),
            cores_per_machine=self.cores_per_machine,
            output=self.output,
            llmperf=self.llmperf,
            backend=self.backend,
            endpoints=tuple(endpoint_of(text, self.security) for text in self.endpoints or ()),
            equal_weights=self.equal_weights,
            drafting=self.drafting,
            one_at_a_time=self.one_at_a_time,
            asked=asked,
        )

    def drafts(self) -> tuple[str, ...]:
        """Return the draft models that are named, or else the bundled one for the bundled target.

        Empty if none is named and no topology needs one.

        Raises:
            ConfigError: a topology needs a draft, none is named, and the target is not the bundled one.
        """
        if set(self._started()) <= {Topology.TARGET}:
            return self.draft_models or ()
        named = self.draft_models or (None,)
        ways = {"flag": "--draft_models", "alone": "--topologies target"}
        return tuple(draft_beside(self.target_model, draft, **ways) for draft in named)

    def _started(self) -> tuple[Topology, ...]:
        return self.topologies or (() if self.endpoints else STARTED)

    def _prompt_sets(self) -> tuple[PromptSet, ...]:
        limit = self.num_prompts if self.datasets or self.num_prompts else NUM_BUNDLED_PROMPTS
        sources = self.datasets or tuple(map(str, BUNDLED_PROMPT_FILES))
        if self.input_tokens is None:
            if RANDOM in sources:
                raise ConfigError(f"dataset {RANDOM} needs --input_tokens, the length of its prompts")
            return tuple(PromptSet(Path(source).stem, read_dataset(Path(source))[:limit]) for source in sources)
        model = self.tokenizer or (None if self.endpoints and not self.topologies else self.target_model)
        pieces = Characters() if model is None else Tokens(_local(model))
        return tuple(self._of_lengths(source, limit, self.input_tokens, pieces) for source in sources)

    def _of_lengths(
        self, source: str, limit: int | None, input_tokens: tuple[float, ...], pieces: Characters
    ) -> PromptSet:
        prompts = () if source == RANDOM else read_dataset(Path(source))
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise ConfigError(f"input_tokens: dataset {source} has conversations, whose lengths are their own")
        seed = self.workload.seed
        lengths = draw_lengths(limit or len(texts) or NUM_BUNDLED_PROMPTS, seed, *input_tokens)
        return PromptSet(Path(source).stem, prompts_of_lengths(texts, lengths, seed, pieces))


def parse_config(arguments: Sequence[str]) -> ComparisonConfig:
    """Return the configuration of the comparison that the arguments describe.

    Raises:
        ConfigError: a value is out of range, or a file cannot be read.
        SystemExit: --help, or a flag that does not exist.
    """
    args = comparison_parser().parse_args(arguments)
    return read(ComparisonSettings, vars(args)).config(as_toml(args))


def _local(model: Path) -> Path:
    """Return the directory of a model; for a hub id, its directory in the hub's cache."""
    return model_directory(str(model)) if is_hub_id(str(model)) else model


_ABOUT: dict[str, Any] = {
    "description": "Compare the target alone, both models in one server (fused), and draft and target on two "
    "machines, with the requests at the draft (distributed) or at the target (pool): speed at equal tokens. Starts "
    "every server itself and writes a report. LIST is comma-separated.",
}


def comparison_parser(kind: type[Any] = ComparisonSettings, **options: Any) -> ConfigFileParser:
    """Return a parser of the flags that the fields of the class `kind` declare.

    Args:
        options: keyword arguments of the parser, such as `prog` and `description`, in place of the comparison's.
    """
    roles = {"comparison": comparison_parser}
    about = {"prog": program("compare", "compare_architectures.py"), **_ABOUT, **options}
    parser = ConfigFileParser(role="comparison", roles=roles, allow_abbrev=False, **about)
    add_group(parser, kind)
    return parser
