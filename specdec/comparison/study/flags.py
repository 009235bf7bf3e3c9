"""Command line of `compare_architectures.py study`: the comparison's flags, some with lists, and the study's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from specdec.comparison.plan.config import ALONE, LOOKUP, ComparisonConfig, Topology
from specdec.comparison.plan.flags import ComparisonSettings, comparison_parser
from specdec.comparison.plan.lists import list_of, one_or_two
from specdec.comparison.study.advice import Prices
from specdec.comparison.study.space import Space
from specdec.inference.cli.config_file import ConfigFileParser, as_toml, program
from specdec.inference.cli.prompts.source import text_of
from specdec.inference.declared import read
from specdec.inference.errors import ConfigError
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.serving.models import NGRAM
from specdec.inference.settings import group, setting

AS_JSON = " as JSON"
"""Suffix of the name of a prompt kind whose answers must fit the JSON schema of --json_schema."""
_LOADS = "1,4,16" if importlib.util.find_spec("locust") else "1"  # more than one needs Locust
_DEFAULTS = {
    "gamma": "8,4,2,16",
    "topologies": "target,fused,distributed",
    "rtt_ms": "10,0.2,80",
    "concurrency": _LOADS,
    "num_runs": "2",
    "output": "reports/study",
}


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """Configuration of a study: its search space, time limit and prices.

    Attributes:
        comparison: all servers that the study needs, and the workload apart from what `space` varies.
        budget_s: seconds of wall time, starts of servers included.
        prices: prices of machines; None for advice without costs.
        schema: grammar of an additional prompt kind's answers, if any.
        anyway: whether to advise even if the machine was busy.
    """

    comparison: ComparisonConfig
    space: Space
    budget_s: float
    prices: Prices | None = None
    schema: Grammar | None = None
    anyway: bool = False


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Flags of the study: its own, and the comparison's, of which --max_new_tokens and --temperature take lists here.

    Attributes:
        anyway: give advice even if other processes kept the machine busy or runs differ much.
        price_per_hour: prices per hour of the target's machine and of a draft's own, in any currency; adds costs per
            million tokens to the advice.
        json_schema: file with a JSON schema; adds a prompt kind: the first kind's prompts, whose answers must fit it.
        max_new_tokens: output tokens per request.
        temperatures: sampling temperatures; 0 is greedy.
    """

    SECTION: ClassVar = "study"

    comparison: ComparisonSettings = group(ComparisonSettings, without=("max_new_tokens", "temperature"))
    anyway: bool = setting(False, "--anyway")
    price_per_hour: tuple[float, ...] | None = setting(
        None, "--price_per_hour TARGET[,DRAFT]", kind=one_or_two("TARGET or TARGET,DRAFT")
    )
    json_schema: Path | None = setting(None, "--json_schema FILE")
    max_new_tokens: tuple[int, ...] = setting((96, 16, 48), "--max_new_tokens LIST", kind=list_of(int))
    temperatures: tuple[float, ...] = setting((0, 1), "--temperature LIST", kind=list_of(float))

    def config(self, asked: str) -> StudyConfig:
        """Return the configuration of the study that these flags describe; raise ConfigError if there is none.

        Args:
            asked: all flags in the format of a --config file.
        """
        length, temperature = next(iter(self.max_new_tokens), 0), next(iter(self.temperatures), -1.0)
        usual = replace(self.comparison.workload, max_new_tokens=length, temperature=temperature)
        drafts = self.comparison.draft_models or (*self.comparison.drafts(), NGRAM)
        comparison = replace(self.comparison, workload=usual, draft_models=drafts).config(asked)
        _require_what_can_be_studied(comparison)
        for length in self.max_new_tokens:  # checks ranges before any server starts
            for temperature in self.temperatures:
                replace(usual, max_new_tokens=length, temperature=temperature)
        prices = Prices(*self.price_per_hour) if self.price_per_hour else None
        schema = None if self.json_schema is None else Grammar(GrammarKind.JSON_SCHEMA, text_of(self.json_schema))
        return StudyConfig(comparison, self._space(comparison), comparison.budget_s, prices, schema, self.anyway)

    def _space(self, config: ComparisonConfig) -> Space:
        by_itself = replace(ALONE, draft=LOOKUP, gamma=max(config.gammas))
        kinds = [prompt_set.kind for prompt_set in config.workload.prompt_sets]
        kinds += [] if self.json_schema is None else [kinds[0] + AS_JSON]
        return Space(
            (by_itself, *(contender for contender in config.contenders if contender != ALONE)),
            {
                "kind": tuple(kinds),
                "rtt_ms": config.network.rtts_ms,
                "concurrency": config.workload.concurrencies,
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperatures,
            },
        )


def parse_study(arguments: Sequence[str]) -> StudyConfig:
    """Return the configuration of the study that the arguments describe.

    Raises:
        ConfigError: a value is out of range, or a file cannot be read.
        SystemExit: --help, or a flag that does not exist.
    """
    args = study_parser().parse_args(arguments)
    return read(StudySettings, vars(args)).config(as_toml(args))


def _require_what_can_be_studied(config: ComparisonConfig) -> None:
    """Raise ConfigError for settings that only a comparison has, and for topologies without the target alone."""
    others = {
        "endpoint": config.endpoints,
        "request_rate": config.workload.request_rates,
        "llmperf": config.llmperf,
        "slo": config.workload.slo.limits,
        "capacity": config.capacity,
        "compile only": config.backend.compile_policy == "only",
    }
    if asked := [name for name, value in others.items() if value]:
        raise ConfigError(f"{', '.join(asked)}: for a comparison, not for a study")
    if Topology.TARGET not in config.topologies:
        raise ConfigError("topologies: a study needs the target alone, which all else is compared with: name target")


def study_parser() -> ConfigFileParser:
    """Return a parser of the flags of the study."""
    defaults = ", ".join(f"--{name} {value}" for name, value in _DEFAULTS.items())
    parser = comparison_parser(
        StudySettings,
        prog=program("study", "compare_architectures.py study"),
        description="Find out when speculation pays, and with what: search over topologies, drafts and conditions "
        "within --budget, and give advice. The search starts from the first value of every list, the usual one. "
        f"Takes the comparison's flags, here with defaults {defaults} and the draft {NGRAM} too, and those at the end.",
    )
    parser.set_defaults(**_DEFAULTS)
    return parser
