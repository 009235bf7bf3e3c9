"""The command line of `compare_architectures.py study`: the comparison's, with lists where it takes one value."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from comparison.plan.config import ALONE, LOOKUP, ComparisonConfig, Topology
from comparison.plan.flags import comparison_parser, config_of, list_of, one_or_two, with_underscores
from comparison.study.advice import Prices
from comparison.study.space import Space
from inference.cli.config_file import as_toml
from inference.cli.models import NGRAM
from inference.cli.prompts.source import text_of
from inference.config import BUNDLED_DRAFT
from inference.errors import ConfigError
from inference.request import Grammar, GrammarKind

AS_JSON = " as JSON"
"""Behind a prompt kind whose answers keep to the schema."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_LOADS = "1,4,16" if importlib.util.find_spec("locust") else "1"  # more than one are Locust's
_DEFAULTS = {
    "draft_models": f"{BUNDLED_DRAFT},{NGRAM}",
    "gamma": "8,4,2,16",
    "topologies": "target,fused,distributed",
    "rtt_ms": "10,0.2,80",
    "concurrency": _LOADS,
    "num_runs": "2",
    "output": "reports/study",
}


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """What is studied, for how long, and what machines cost, if anybody asks.

    Attributes:
        comparison: all servers that the study needs, and the workload but for what `space` varies.
        schema: of the answers of one more prompt kind.
        anyway: advise also where the machine was busy.
    """

    comparison: ComparisonConfig
    space: Space
    budget_s: float
    prices: Prices | None = None
    schema: Grammar | None = None
    anyway: bool = False


def parse_study(arguments: Sequence[str]) -> StudyConfig:
    """The study that the arguments ask for.

    Raises:
        ConfigError: a value is out of range, or a file cannot be read.
        SystemExit: --help, or a flag that does not exist.
    """
    args = _parser().parse_args([with_underscores(argument) for argument in arguments])
    usual = {"max_new_tokens": next(iter(args.max_new_tokens), 0), "temperature": next(iter(args.temperature), -1.0)}
    comparison = replace(config_of(argparse.Namespace(**{**vars(args), **usual})), asked=as_toml(args))
    _require_what_can_be_studied(comparison)
    for length in args.max_new_tokens:  # refuses what is out of range before anything is started
        for temperature in args.temperature:
            replace(comparison.workload, max_new_tokens=length, temperature=temperature)
    prices = Prices(*args.price_per_hour) if args.price_per_hour else None
    schema = None if args.json_schema is None else Grammar(GrammarKind.JSON_SCHEMA, text_of(args.json_schema))
    return StudyConfig(comparison, _space(comparison, args), _seconds(args.budget), prices, schema, args.anyway)


def _require_what_can_be_studied(config: ComparisonConfig) -> None:
    """All servers at once, closed loops, and contenders whose draft is known."""
    others = {
        "endpoint": config.endpoints,
        "request_rate": config.workload.request_rates,
        "one_at_a_time": config.one_at_a_time,
        "llmperf": config.llmperf,
        "slo": config.workload.slo.limits,
        "compile only": config.backend.compile_policy == "only",
    }
    if asked := [name for name, value in others.items() if value]:
        raise ConfigError(f"{', '.join(asked)}: for a comparison, not for a study")
    if Topology.TARGET not in config.topologies:
        raise ConfigError("topologies: a study needs the target alone, which all else is compared with: name target")


def _space(config: ComparisonConfig, args: argparse.Namespace) -> Space:
    by_itself = replace(ALONE, draft=LOOKUP, gamma=max(config.gammas))
    kinds = [prompt_set.kind for prompt_set in config.workload.prompt_sets]
    kinds += [] if args.json_schema is None else [kinds[0] + AS_JSON]
    return Space(
        (by_itself, *(contender for contender in config.contenders if contender != ALONE)),
        {
            "kind": tuple(kinds),
            "rtt_ms": config.network.rtts_ms,
            "concurrency": config.workload.concurrencies,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
        },
    )


def _parser() -> argparse.ArgumentParser:
    defaults = ", ".join(f"--{name} {value}" for name, value in _DEFAULTS.items())
    parser = comparison_parser(
        prog="compare_architectures.py study",
        description="Find out when speculation pays, and with what: search over ways to serve and conditions for as "
        "long as you say, and advise. Of every list the first value is the usual one, from which the search begins. "
        f"All flags are the comparison's, here with {defaults}, but for those at the end.",
        conflict_handler="resolve",  # two of the comparison's are lists here
    )
    parser.set_defaults(**_DEFAULTS)
    text = "time for measuring, such as 90s, 10m, 1h (%(default)s)"
    parser.add_argument("--budget", type=_time, default="10m", metavar="TIME", help=text)
    text = "give advice although other processes kept the machine busy, or runs differ much"
    parser.add_argument("--anyway", action="store_true", help=text)
    text = "of the target's machine, and of a draft's own, in any currency: costs per million tokens follow"
    prices = one_or_two("TARGET or TARGET,DRAFT")
    parser.add_argument("--price_per_hour", type=prices, metavar="TARGET[,DRAFT]", help=text)
    text = "one more prompt kind: the first one's prompts, with answers that keep to this schema"
    parser.add_argument("--json_schema", type=Path, metavar="FILE", help=text)
    text = "output tokens per request (%(default)s)"
    parser.add_argument("--max_new_tokens", type=list_of(int), default="96,16,48", metavar="LIST", help=text)
    text = "temperatures (%(default)s)"
    parser.add_argument("--temperature", type=list_of(float), default="0,1", metavar="LIST", help=text)
    return parser


def _time(text: str) -> str:
    if not re.fullmatch(r"\d+(?:\.\d+)?[smh]", text) or _seconds(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 10m or 1h")
    return text


def _seconds(text: str) -> float:
    return float(text[:-1]) * _UNITS_S[text[-1]]
