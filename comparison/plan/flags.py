"""The command line of compare_architectures.py, and how it becomes a `ComparisonConfig`."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from comparison.plan.backend import AUTO, NEURON, BackendConfig
from comparison.plan.config import (
    STARTED,
    ClientSite,
    ComparisonConfig,
    NetworkConfig,
    PromptSet,
    WorkloadConfig,
)
from comparison.plan.datasets import read_dataset
from comparison.plan.endpoint import endpoint_of
from comparison.plan.lengths import Characters, Tokens, draw_lengths, prompts_of_lengths
from comparison.plan.slo import FIGURES, Slo, parse_slo
from inference.cli.config_file import ConfigFileParser, as_toml
from inference.cli.flags import add_flag, add_group, read
from inference.cli.models import LoadingSettings
from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    COMPILE_POLICIES,
    DEFAULT_BRANCHES,
    DEFAULT_GAMMA,
    DTYPES,
    ROOT,
    SPECULATION_METHODS,
    DialSecurity,
)
from inference.errors import ConfigError
from inference.request import Schedule
from inference.serving.hub import is_hub_id, model_directory

BUNDLED_PROMPT_FILES = (ROOT / "prompts" / "structured.txt", ROOT / "prompts" / "open_ended.txt")
NUM_BUNDLED_PROMPTS = 3
"""Of each kind, so that a run without arguments ends within four minutes on two cores."""

DEFAULT_RTTS_MS = (0.0, 10.0, 50.0)
RANDOM = "random"
"""The dataset of no file."""

ValueT = TypeVar("ValueT")
EnumT = TypeVar("EnumT", bound=enum.Enum)


def parse_config(arguments: Sequence[str]) -> ComparisonConfig:
    """The comparison that the arguments ask for.

    Raises:
        ConfigError: a value is out of range, or a file cannot be read.
        SystemExit: --help, or a flag that does not exist.
    """
    return config_of(comparison_parser().parse_args([with_underscores(argument) for argument in arguments]))


def config_of(args: argparse.Namespace) -> ComparisonConfig:
    """The comparison that parsed flags ask for; raises as `parse_config` does."""
    security = read(DialSecurity, args)
    return ComparisonConfig(
        target_model=_local(args.target_model),
        draft_models=tuple(str(_local(Path(draft))) for draft in args.draft_models),
        topologies=args.topologies or (() if args.endpoint else STARTED),
        gammas=args.gamma,
        schedules=args.schedule,
        branches=args.branches,
        network=_network(args),
        workload=WorkloadConfig(
            prompt_sets=_prompt_sets(args),
            concurrencies=args.concurrency,
            request_rates=args.request_rate,
            slo=parse_slo(args.slo) if args.slo else Slo(),
            **{name: getattr(args, name) for name in _OF_THE_WORKLOAD},
        ),
        usable_cores=tuple(sorted(os.sched_getaffinity(0))),
        cores_per_machine=args.cores_per_machine,
        output=args.output,
        llmperf=args.llmperf,
        backend=_backend(args),
        endpoints=tuple(endpoint_of(text, security) for text in args.endpoint or ()),
        equal_weights=args.equal_weights,
        one_at_a_time=args.one_at_a_time,
        asked=as_toml(args),
    )


_SAMPLING = ("max_new_tokens", "temperature", "seed", "ignore_eos")
_OF_THE_WORKLOAD = (*_SAMPLING, "num_runs", "deadline_s", "num_arrivals", "warm_up")
"""Flags that are called as the fields of `WorkloadConfig` are."""


def _network(args: argparse.Namespace) -> NetworkConfig:
    rtts_ms = args.rtt_ms or ((0.0,) if args.endpoint else DEFAULT_RTTS_MS)
    return NetworkConfig(rtts_ms, args.jitter_ms, args.bandwidth_mbps, ClientSite(args.client_site))


def _backend(args: argparse.Namespace) -> BackendConfig:
    draft_name = args.draft_backend or args.backend
    neuron_only = {"neuron_config", "compiled_model_path", "first_core", "draft_tp_degree"}
    given = {name for name in neuron_only if getattr(args, name) is not None}
    if given and NEURON not in (args.backend, draft_name):
        raise ConfigError(f"{min(given)} needs backend {NEURON}, not {args.backend}")
    passed_on = ("dtype", "sequence_length", "neuron_config", "compiled_model_path")
    values = {name: getattr(args, name) for name in passed_on}
    return BackendConfig(
        args.backend,
        draft_name,
        args.tp_degree,
        args.draft_tp_degree or args.tp_degree,
        args.speculation_method,
        args.first_core or 0,
        tuple(f"--{name}={value}" for name, value in values.items() if value is not None),
        args.device_sampling,
        args.compile,
        args.emulate,
        args.draft_dtype,
    )


def _prompt_sets(args: argparse.Namespace) -> tuple[PromptSet, ...]:
    limit = args.num_prompts if args.dataset or args.num_prompts else NUM_BUNDLED_PROMPTS
    sources = args.dataset or list(map(str, BUNDLED_PROMPT_FILES))
    if args.input_tokens is None:
        if RANDOM in sources:
            raise ConfigError(f"dataset {RANDOM} needs --input_tokens, which says how long its prompts are")
        return tuple(PromptSet(Path(source).stem, read_dataset(Path(source))[:limit]) for source in sources)
    model = args.tokenizer or (None if args.endpoint and not args.topologies else args.target_model)
    pieces = Characters() if model is None else Tokens(_local(model))
    return tuple(_of_lengths(source, args, limit, pieces) for source in sources)


def _of_lengths(source: str, args: argparse.Namespace, limit: int | None, pieces: Characters) -> PromptSet:
    prompts = () if source == RANDOM else read_dataset(Path(source))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ConfigError(f"input_tokens: dataset {source} has conversations, whose lengths are their own")
    lengths = draw_lengths(limit or len(texts) or NUM_BUNDLED_PROMPTS, args.seed, *args.input_tokens)
    return PromptSet(Path(source).stem, prompts_of_lengths(texts, lengths, args.seed, pieces))


def with_underscores(argument: str) -> str:
    """`--rtt-ms=5` as `--rtt_ms=5`: both spellings are taken."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _local(model: Path) -> Path:
    """A model's directory, in the hub's cache if it is named by a hub id."""
    return model_directory(str(model)) if is_hub_id(str(model)) else model


def one_or_two(names: str) -> Callable[[str], tuple[float, ...]]:
    """A parser of FIRST or FIRST,SECOND, both at least 0."""

    def parse(text: str) -> tuple[float, ...]:
        numbers = list_of(float)(text)
        if not 1 <= len(numbers) <= 2 or min(numbers) < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}, each at least 0")
        return numbers

    return parse


def list_of(convert: Callable[[str], ValueT]) -> Callable[[str], tuple[ValueT, ...]]:
    """A parser of comma-separated values."""

    def parse(text: str) -> tuple[ValueT, ...]:
        parts = [part.strip(' "') for part in text.strip("[] ").split(",")]  # as arrays of a --config file come, too
        return tuple(convert(part) for part in parts if part)

    parse.__name__ = f"list of {convert.__name__}"  # for the message of argparse
    return parse


def _one_of(kind: str, values: Iterable[EnumT]) -> Callable[[str], EnumT]:
    """A parser of the names that these have."""
    by_name = {value.value: value for value in values}

    def parse(text: str) -> EnumT:
        if text not in by_name:
            raise argparse.ArgumentTypeError(f"{kind} {text} is none of {', '.join(by_name)}")
        return by_name[text]

    return parse


_schedules = list_of(_one_of("schedule", Schedule))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


_ABOUT: dict[str, Any] = {
    "prog": "compare_architectures.py",
    "description": "Compare the target alone, both models in one server (fused), and draft and target on two "
    "machines, with the requests at the draft (distributed) or at the target (pool): speed at equal tokens. Starts "
    "every server itself and writes a report. LIST is comma-separated; names may be spelled with - or _.",
}


def comparison_parser(**options: Any) -> ConfigFileParser:
    """All flags of the comparison; `options` are argparse's."""
    roles = {"comparison": comparison_parser}
    parser = ConfigFileParser(role="comparison", roles=roles, allow_abbrev=False, **{**_ABOUT, **options})
    workload = (_add_contenders, _add_endpoints, _add_workload, _add_arrivals)
    for add in (*workload, _add_network, _add_machines, _add_backend, _add_output):
        add(parser)
    return parser


def _add_contenders(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    names = ",".join(topology.value for topology in STARTED)
    text = f"some of {names} (all; with --endpoint none)"
    group.add_argument("--topologies", type=list_of(_one_of("topology", STARTED)), metavar="LIST", help=text)
    text = "target model directory (%(default)s)"
    group.add_argument("--target_model", type=Path, default=BUNDLED_TARGET, metavar="DIR", help=text)
    text = "draft model directories; ngram is prompt lookup without a model (%(default)s)"
    group.add_argument("--draft_models", type=list_of(str), default=str(BUNDLED_DRAFT), metavar="LIST", help=text)
    text = "draft tokens per round; several are a sweep (%(default)s)"
    group.add_argument("--gamma", type=list_of(int), default=str(DEFAULT_GAMMA), metavar="LIST", help=text)
    text = "of distributed: sync (rounds), async (the draft runs ahead), or both (%(default)s)"
    group.add_argument("--schedule", type=_schedules, default="sync,async", metavar="LIST", help=text)
    text = "beside the chain of a draft that runs ahead, at most; 0 is none (%(default)s)"
    group.add_argument("--branches", type=list_of(int), default=str(DEFAULT_BRANCHES), metavar="LIST", help=text)


def _add_endpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoints (servers that run already)")
    text = "grpc://HOST:PORT of ours, or http(s)://HOST:PORT/v1 of any OpenAI-compatible server; may be repeated; "
    text += "behind it, after commas, what of --tls_ca, --token_file ... is its own"
    group.add_argument("--endpoint", action="append", metavar="NAME=URL", help=text)
    text = "all of them have the weights of everybody else: greedy answers must be the same"
    group.add_argument("--equal_weights", action="store_true", help=text)
    add_group(parser, DialSecurity)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    text = "a text file of a prompt per line, .jsonl of chats, .json of ShareGPT, or random; its name is the prompt "
    text += "kind; may be repeated (prompts/structured.txt and prompts/open_ended.txt)"
    group.add_argument("--dataset", "--prompt_file", action="append", metavar="FILE", help=text)
    text = "lengths of prompts, normally distributed: texts are cut, or go on with the next (as they are)"
    group.add_argument("--input_tokens", type=one_or_two("MEAN or MEAN,STDDEV"), metavar="MEAN,STDDEV", help=text)
    text = "model directory whose tokenizer counts them (--target_model; of endpoints alone 4 characters a token)"
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)
    text = f"prompts of each file ({NUM_BUNDLED_PROMPTS}, or all of a --prompt-file)"
    group.add_argument("--num_prompts", type=_positive, metavar="N", help=text)
    group.add_argument("--num_runs", type=int, default=3, metavar="N", help="repeats, interleaved (%(default)s)")
    text = "output tokens per request (%(default)s)"
    group.add_argument("--max_new_tokens", type=int, default=96, metavar="N", help=text)
    text = "answers do not end by themselves: all have --max_new_tokens"
    group.add_argument("--ignore_eos", action="store_true", help=text)
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="key of the noise, 0 .. 2^64-1 (%(default)s)")
    text = "requests in flight at once; above 1 needs Locust, see requirements-loadtest.txt (%(default)s)"
    group.add_argument("--concurrency", type=list_of(int), default="1", metavar="LIST", help=text)
    text = "time a request may take (%(default)s s)"
    group.add_argument("--deadline_s", type=float, default=120.0, metavar="S", help=text)


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests that come on their own (an open loop); what is asked of answers")
    text = "requests per second, at random times, beside --concurrency; latency counts from when each was due"
    group.add_argument("--request_rate", type=list_of(float), default="", metavar="LIST", help=text)
    text = "of them, in each run (%(default)s)"
    group.add_argument("--num_arrivals", type=int, default=32, metavar="N", help=text)
    text = "prompts of each kind that each contender answers before anything counts (%(default)s)"
    group.add_argument("--warm_up", type=int, default=1, metavar="N", help=text)
    text = f"limits that an answer must keep to be goodput, of {', '.join(FIGURES)}, such as ttft:200ms,itl:50ms"
    group.add_argument("--slo", metavar="LIMITS", help=text)


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network between edge and target (a proxy on loopback)")
    text = f"round trip times, milliseconds ({','.join(f'{rtt:g}' for rtt in DEFAULT_RTTS_MS)}), or 0 with --endpoint"
    group.add_argument("--rtt_ms", type=list_of(float), metavar="LIST", help=text)
    text = "further delay of up to so much, milliseconds per direction (%(default)s)"
    group.add_argument("--jitter_ms", type=float, default=0.0, metavar="MS", help=text)
    text = "megabits per second and direction (unlimited)"
    group.add_argument("--bandwidth_mbps", type=float, metavar="MBPS", help=text)
    text = "the thin client sits beside the draft worker (edge) or beside the target (%(default)s)"
    group.add_argument("--client_site", choices=[site.value for site in ClientSite], default="edge", help=text)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines (a machine is a set of CPU cores of this host)")
    text = "cores, and threads of a model, on each machine (%(default)s)"
    group.add_argument("--cores_per_machine", type=int, default=1, metavar="N", help=text)
    text = "start, measure and stop one architecture after the other, where all together do not fit on this host"
    group.add_argument("--one_at_a_time", action="store_true", help=text)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what computes (see main.py and docs/neuron.md)")
    group.add_argument("--backend", default=AUTO, metavar="NAME", help="of the models (%(default)s)")
    text = "of the draft of the distributed topology (--backend); such as torch, with a target on neuron"
    group.add_argument("--draft_backend", metavar="NAME", help=text)
    text = "NeuronCores of each target and fused pair; all servers run at once, each on cores of its own (%(default)s)"
    group.add_argument("--tp_degree", type=int, default=1, metavar="N", help=text)
    group.add_argument("--draft_tp_degree", type=int, metavar="N", help="NeuronCores of a draft (--tp_degree)")
    text = "number of the first NeuronCore that may be used (0)"
    group.add_argument("--first_core", type=int, metavar="N", help=text)
    text = "of a fused pair on neuron; vanilla takes several --gamma (main.py's)"
    group.add_argument("--speculation_method", choices=SPECULATION_METHODS, help=text)
    text = "target and fused pair choose on the device, both (main.py's); of topologies target and fused, greedy"
    group.add_argument("--device_sampling", action="store_true", help=text)
    group.add_argument("--neuron_config", metavar="JSON", help="parameters of NxDI's NeuronConfig, of every model")
    group.add_argument("--compiled_model_path", metavar="DIR", help="folder of compiled models")
    text = "what is not compiled yet (main.py's; %(default)s); only measures nothing"
    group.add_argument("--compile", choices=COMPILE_POLICIES, default=COMPILE_POLICIES[0], help=text)
    group.add_argument("--dtype", metavar="NAME", help="arithmetic on neuron (main.py's)")
    text = "arithmetic of a draft worker on the CPU (main.py's); int8 needs backend onnx"
    group.add_argument("--draft_dtype", choices=DTYPES, help=text)
    group.add_argument("--sequence_length", type=int, metavar="N", help="tokens per slot on neuron (main.py's)")
    add_flag(group, LoadingSettings, "emulation")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    text = "directory for results.csv, results.json, report.html and the plots (%(default)s)"
    group.add_argument("--output", type=Path, default=Path("reports/comparison"), metavar="DIR", help=text)
    text = "also write LLMPerf's two JSON files for each measurement, into DIR/llmperf"
    group.add_argument("--llmperf", action="store_true", help=text)
