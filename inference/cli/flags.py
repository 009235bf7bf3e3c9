"""The flags of main.py, in groups; each role takes the groups it needs. Names keep their underscores everywhere."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_PROMPTS,
    BUNDLED_TARGET,
    CALL_PARSERS,
    COMPILE_POLICIES,
    DEFAULT_BRANCHES,
    DEFAULT_GAMMA,
    DRAINS,
    DTYPES,
    FUSED_GAMMA,
    NOT_EMULATED,
    REASONING_PARSERS,
    SPECULATION_METHODS,
    ConnectionConfig,
    Emulation,
    FusedConfig,
    HttpConfig,
    ModelConfig,
    NeuronOptions,
    ServerConfig,
)
from inference.errors import ConfigError
from inference.request import DEFAULT_MAX_NEW_TOKENS, SamplingParams, Schedule

DEFAULT_SERVE_PORT = 50052
NGRAM = "ngram"
"""As a draft model: look drafts up in the sequence itself."""


def _add(group: argparse._ArgumentGroup, config: type[Any], name: str, text: str, **options: Any) -> None:
    """The flag of a configuration's field, which has its name, and whose default is its own."""
    default = next(field.default for field in fields(config) if field.name == name)
    if isinstance(default, bool):
        options["action"] = argparse.BooleanOptionalAction
    elif not isinstance(default, str):
        options = {"type": type(default), "metavar": "S" if isinstance(default, float) else "N", **options}
    group.add_argument(f"--{name}", default=default, help=text, **options)


def add_model(parser: argparse.ArgumentParser, *, default: Path, what: str) -> None:
    group = parser.add_argument_group("model")
    text = f"{what} model directory (%(default)s)"
    group.add_argument("--model", f"--{what}_model", type=Path, default=default, metavar="DIR", help=text)
    _add_loading(parser, group)


def _add_loading(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, *, pair: bool = False) -> None:
    """How the models of a group are found and loaded; in a pair, the draft's flags beside its target's."""
    text = "branch, tag or commit of a model that is named by its hub id (NAMESPACE/NAME instead of DIR)"
    group.add_argument("--revision", metavar="REV", help=text)
    if pair:
        group.add_argument("--draft_revision", metavar="REV", help="the same, of the draft model")
    _add_backend(group)
    _add_neuron(parser)
    if pair:
        group = parser.add_argument_group("AWS Neuron devices: the draft beside its target")
        text = "logical NeuronCores that the draft is sharded over; must divide --tp_degree (default: --tp_degree)"
        group.add_argument("--draft_tp_degree", type=int, metavar="N", help=text)


def add_draft_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    text = f"draft model directory, or {NGRAM} to look drafts up in the sequence itself (%(default)s)"
    group.add_argument("--model", "--draft_model", default=str(BUNDLED_DRAFT), metavar="DIR", help=text)
    text = f"with {NGRAM}: model directory whose tokenizer is used (%(default)s)"
    group.add_argument("--tokenizer", type=Path, default=BUNDLED_DRAFT, metavar="DIR", help=text)
    _add_loading(parser, group)


def add_model_pair(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    text = "target model directory (%(default)s)"
    group.add_argument("--target_model", type=Path, default=BUNDLED_TARGET, metavar="DIR", help=text)
    text = f"draft model directory, or {NGRAM} to look drafts up in the sequence itself (%(default)s)"
    group.add_argument("--draft_model", default=str(BUNDLED_DRAFT), metavar="DIR", help=text)
    _add_loading(parser, group, pair=True)


def add_compiled_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models (one, or both)")
    text = "target model directory: compiles what --role target or verify_target loads (with --gamma 0)"
    group.add_argument("--target_model", "--model", type=Path, metavar="DIR", help=text)
    text = "draft model directory: compiles what --role draft loads; with a target, what --role fused_target loads"
    group.add_argument("--draft_model", type=Path, metavar="DIR", help=text)
    _add_loading(parser, group, pair=True)
    parser.set_defaults(backend="neuron")


def _add_neuron(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AWS Neuron devices (backend neuron)")
    _add(group, NeuronOptions, "tp_degree", "logical NeuronCores that a model is sharded over (%(default)s)")
    text = (
        "vanilla: slot models, any sampling; others: NxDI's own graphs (default: fused for fused_target); medusa: the "
        "target's own heads, no draft model"
    )
    group.add_argument("--speculation_method", choices=SPECULATION_METHODS, help=text)
    text = (
        "let the device choose tokens where the host could (fused, or a target alone): less traffic, but fused is then "
        "greedy, and a target alone takes no seeds"
    )
    group.add_argument("--device_sampling", action="store_true", help=text)
    text = "further parameters of NxDI's NeuronConfig, as a JSON object; several are merged"
    group.add_argument(
        "--neuron_config", type=_json_object, action=_MergeObjects, default={}, metavar="JSON", help=text
    )
    text = "NeuronCores of this process, such as 0-3,8 (default: $NEURON_RT_VISIBLE_CORES, or all)"
    group.add_argument("--neuron_cores", metavar="LIST", help=text)
    add_compiled_model_path(group)
    text = "what is not compiled yet: auto compiles it, never refuses, only compiles and ends (%(default)s)"
    group.add_argument("--compile", choices=COMPILE_POLICIES, default=COMPILE_POLICIES[0], help=text)


def add_compiled_model_path(group: argparse._ArgumentGroup) -> None:
    text = "folder of compiled models (default: $NEURON_COMPILED_ARTIFACTS, or one in the user's cache)"
    group.add_argument("--compiled_model_path", type=Path, metavar="DIR", help=text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


GAMMA_OF_A_ROUND = "draft tokens per round, 0 for none (%(default)s)"
GAMMA_OF_A_SERVER = "draft tokens per round, 0 for none (default: the server's)"
GAMMA_THAT_PAYS = (
    f"draft tokens per pass at most, as many as pay; 0 for none (default: {FUSED_GAMMA}; "
    f"where draft and target are one compiled graph, always so many: {DEFAULT_GAMMA})"
)


class _MergeObjects(argparse.Action):
    """Later objects win, name by name."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **values})


def _port(text: str) -> int:
    """A port to listen on; 0 takes a free one."""
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"port {port} is outside 0..65535")
    return port


def _mebibytes(text: str) -> float:
    """A size that can be counted in bytes."""
    size = float(text)
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"{size} MiB is not above 0 and finite")
    return size


def add_verification(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verification")
    text = "draft tokens that a compiled pass has room for, 0 for none (%(default)s; other backends take any number)"
    group.add_argument("--gamma", "--speculation_length", type=int, default=DEFAULT_GAMMA, metavar="N", help=text)


def _add_backend(group: argparse._ArgumentGroup) -> None:
    text = "inference engine: torch, onnx, neuron, ... (%(default)s: the fastest exact one)"
    group.add_argument("--backend", default="auto", help=text)
    _add(group, ModelConfig, "device", "auto, cpu, cuda, cuda:N (%(default)s: CUDA where there is one)")
    text = "arithmetic (%(default)s: float32 on CPU, bfloat16 elsewhere; int8: linear layers, backend onnx)"
    _add(group, ModelConfig, "dtype", text, choices=["auto", *DTYPES])
    text = "prompt and output together (default: the model's limit, at most 2048)"
    group.add_argument("--sequence_length", type=int, metavar="TOKENS", help=text)
    group.add_argument("--batch", type=int, default=8, metavar="N", help="sequences in flight at once (%(default)s)")
    text = (
        "CPU threads of a pass (default: the cores this process may use, less one on a target that shares the machine "
        "with its draft, that is, listens on loopback; a draft takes one)"
    )
    group.add_argument("--threads", type=int, default=0, metavar="N", help=text)
    text = "begin a request with what earlier ones have left in the slots, as far as it is the same (%(default)s)"
    _add(group, ModelConfig, "prefix_caching", text)
    add_emulate(group)


def add_emulate(group: argparse._ArgumentGroup) -> None:
    text = "passes take at least so long, asleep, as on an accelerator: target:25ms,draft:3ms, or one of the two"
    group.add_argument("--emulate", type=_emulation, default=NOT_EMULATED, metavar="PASSES", help=text)


def _emulation(text: str) -> Emulation:
    try:
        return Emulation.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_listen(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _add(group, ServerConfig, "port", "port to listen on, 0 for a free one (%(default)s)", metavar=None)
    _add_life(parser, group)


def _add_life(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Of a gRPC server: where it listens, how many wait, how it ends, what protects it."""
    _add_host(group)
    _add(group, ServerConfig, "max_waiting", "requests queued for a slot (%(default)s)")
    _add_grace(group)
    _add_drain(group)
    _add_port_security(parser, group)


def _add_host(group: argparse._ArgumentGroup) -> None:
    _add(group, ServerConfig, "host", "address to listen on (%(default)s; 0.0.0.0 for all)")


def _add_port_security(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, *, grpc: bool = True) -> None:
    text = "answer /livez and /readyz over plain HTTP on this port, to anybody (default: nowhere)"
    group.add_argument("--probe_port", type=_port, metavar="PORT", help=text)
    group = parser.add_argument_group("security of ports (docs/security.md)")
    group.add_argument("--tls_cert", type=Path, metavar="FILE", help="the server's certificate, with its chain (PEM)")
    group.add_argument("--tls_key", type=Path, metavar="FILE", help="its key (PEM)")
    text = "instead, for a trial: make a CA and certificates in this folder, unless it has them, and use them"
    group.add_argument("--tls_self_signed", type=Path, metavar="DIR", help=text)
    if grpc:
        text = "CAs of clients' certificates (PEM), for --mtls_port"
        group.add_argument("--tls_client_ca", type=Path, metavar="FILE", help=text)
        text = "a further port of gRPC, for clients with a certificate (default: nowhere)"
        group.add_argument("--mtls_port", type=_port, metavar="PORT", help=text)
    text = "who may do what (TOML); from then on, nobody else may do anything (default: everybody may)"
    group.add_argument("--auth_file", type=Path, metavar="FILE", help=text)
    _add_insecure(group)


def _add_insecure(group: argparse._ArgumentGroup) -> None:
    text = "allow plain text where others could read along: another host than loopback"
    group.add_argument("--insecure", action="store_true", help=text)


def add_dial_security(parser: argparse.ArgumentParser, *, insecure: bool) -> None:
    group = parser.add_argument_group("security of connections (docs/security.md)")
    text = "dial with TLS; the server's certificate must come from one of these CAs (PEM)"
    group.add_argument("--tls_ca", type=Path, metavar="FILE", help=text)
    group.add_argument("--tls_client_cert", type=Path, metavar="FILE", help="certificate to show (PEM)")
    group.add_argument("--tls_client_key", type=Path, metavar="FILE", help="its key (PEM)")
    text = "name that must be in the server's certificate (default: the host that is dialled)"
    group.add_argument("--tls_server_name", metavar="NAME", help=text)
    group.add_argument("--token_file", type=Path, metavar="FILE", help="file with the token to send")
    if insecure:
        _add_insecure(group)


def add_watchdog(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watchdog")
    text = "not ready, and not alive, while a pass of the model takes longer than this (%(default)s s)"
    _add(group, ServerConfig, "pass_timeout_s", text)


def add_metrics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics")
    text = "serve Prometheus metrics at /metrics of this port, on the server's host (default: nowhere)"
    group.add_argument("--metrics_port", type=_port, metavar="PORT", help=text)


def add_spans(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traces")
    text = "send OpenTelemetry traces of requests to this collector, such as http://localhost:4317 (default: nowhere)"
    group.add_argument("--otlp_endpoint", metavar="URL", help=text)


def add_http(parser: argparse.ArgumentParser, *, default_port: int | None) -> None:
    group = parser.add_argument_group("OpenAI-compatible HTTP")
    text = "port of the HTTP server" + (" (%(default)s)" if default_port else "; without it there is none")
    group.add_argument("--http_port", type=_port, default=default_port, metavar="PORT", help=text)
    text = "what a stream's event carries: one token, or all tokens of a target pass (%(default)s)"
    group.add_argument("--stream_chunk", choices=["token", "pass"], default="token", help=text)
    group.add_argument("--served_model_name", metavar="NAME", help="name of the model (default: its directory's)")
    text = "largest request body in MiB (%(default)s)"
    group.add_argument("--max_body_mib", type=_mebibytes, default=8.0, metavar="MIB", help=text)
    text = "give a stream that is silent for this long an empty chunk, for proxies that would end it; 0: never (0)"
    _add(group, HttpConfig, "sse_ping_s", text)
    group.add_argument("--no_page", action="store_true", help="no page at /")
    text = "how the model writes calls of tools; auto: as its chat template says (%(default)s)"
    _add(group, HttpConfig, "tool_call_parser", text, choices=CALL_PARSERS)
    text = "split <think>...</think> off as reasoning_content; auto: where the chat template has it (%(default)s)"
    _add(group, HttpConfig, "reasoning_parser", text, choices=REASONING_PARSERS)


def add_http_listen(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _add_host(group)
    _add_grace(group)
    _add_port_security(parser, group, grpc=False)


def add_sessions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sessions of draft workers")
    _add(group, ServerConfig, "idle_timeout_s", "end a session that has had no proposal for this long (%(default)s s)")
    text = "sessions that one worker of the pool is given at most, whatever it claims to have room for (%(default)s)"
    _add(group, ServerConfig, "max_worker_slots", text)


def _add_grace(group: argparse._ArgumentGroup) -> None:
    _add(group, ServerConfig, "grace_s", "on SIGTERM, time for running requests (%(default)s s)")
    text = "before that, time in which balancers hear that this server is not ready; it still serves (%(default)s s)"
    _add(group, ServerConfig, "drain_delay_s", text)
    _add(group, ServerConfig, "stall_timeout_s", "drop a client that has read nothing for this long (%(default)s s)")
    text = "also drain, as on SIGTERM, when stdin ends: when whoever holds its other end is gone"
    group.add_argument("--lifeline", choices=["stdin"], help=text)
    text = "when all ports are open, write one line of JSON to stdout, with the ports that 0 became"
    group.add_argument("--ready_json", action="store_true", help=text)


def _add_drain(group: argparse._ArgumentGroup) -> None:
    text = (
        "on SIGTERM, requests whose callers have another server go on there after a second, with the same tokens, or "
        "wait for their end like all others (%(default)s)"
    )
    _add(group, ServerConfig, "drain", text, choices=DRAINS)


def add_serve(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("service (instead of prompts)")
    text = (
        f"serve clients on this port ({DEFAULT_SERVE_PORT} if none is named) instead of reading prompts; with --attach "
        "only the health service"
    )
    group.add_argument("--serve", type=int, nargs="?", const=DEFAULT_SERVE_PORT, metavar="PORT", help=text)
    _add_life(parser, group)


def add_connection(parser: argparse.ArgumentParser, *, what: str, serves: bool = True) -> None:
    group = parser.add_argument_group("connection")
    text = f"{what}, or several replicas: HOST[:PORT],..., dns:///NAME[:PORT] or a list in file:///PATH (%(default)s)"
    group.add_argument("--target_host", default="127.0.0.1", metavar="HOST", help=text)
    _add(group, ServerConfig, "port", "the port of hosts without one (%(default)s)", metavar=None)
    _add(group, ConnectionConfig, "connect_timeout_s", "wait for the server at start (%(default)s s)")
    _add(group, ConnectionConfig, "deadline_s", "time a request may take (%(default)s s)")
    text = "a request whose server is lost goes on within this time, at another one or there (%(default)s s)"
    _add(group, ConnectionConfig, "reconnect_timeout_s", text)
    add_dial_security(parser, insecure=not serves)


def add_concurrency(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--batch", type=int, default=8, metavar="N", help="prompts in flight at once (%(default)s)")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("link to the target")
    text = "async: run ahead of the target, which decodes by itself meanwhile; sync: draft, send, wait (%(default)s)"
    schedules = [schedule.value for schedule in Schedule]
    group.add_argument("--schedule", choices=schedules, default=Schedule.ASYNC.value, help=text)
    text = (
        "run-ahead: prepare so many branches beside a chain at most, where the round trip makes them pay; "
        "each takes a slot of the draft model, 0 is none (%(default)s)"
    )
    group.add_argument("--branches", type=int, default=DEFAULT_BRANCHES, metavar="N", help=text)


def add_attach(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pool (instead of prompts)")
    text = "draft for these targets' sessions until stopped; dns:///NAME:PORT: all of a name, file:///PATH: of a list"
    group.add_argument("--attach", metavar="HOST:PORT[,...]", help=text)


def add_speculation(parser: argparse.ArgumentParser, *, default: int | None, text: str = GAMMA_OF_A_ROUND) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument("--gamma", "--speculation_length", type=int, default=default, metavar="N", help=text)


def add_adaptive_gamma(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation length")
    text = "draft only as many of gamma tokens as pay, by the draft's confidence and the measured times (%(default)s)"
    _add(group, FusedConfig, "adaptive_gamma", text)


def add_lookup(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("passes without draft tokens")
    text = "propose what followed a request's last tokens where they stood before, as wide as pays (%(default)s)"
    _add(group, ServerConfig, "lookup", text)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and output")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    text = "a UTF-8 file with one prompt per line (%(default)s)"
    source.add_argument("--prompt_text", type=Path, default=BUNDLED_PROMPTS, metavar="FILE", help=text)
    text = "output tokens (%(default)s)"
    group.add_argument("--max_new_tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, metavar="N", help=text)
    text = "json: one object per prompt, a line each"
    group.add_argument("--format", choices=["text", "json"], default="text", help=text)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    _add(group, SamplingParams, "temperature", "0 is greedy (%(default)s)", metavar=None)
    _add(group, SamplingParams, "top_k", "keep the K likeliest tokens, 0 for all (%(default)s)", metavar="K")
    _add(group, SamplingParams, "top_p", "keep this much probability (%(default)s)", metavar="P")
    _add(group, SamplingParams, "min_p", "keep tokens of this share of the best one (%(default)s)", metavar="P")
    text = "divide positive logits of tokens in prompt or output by this, multiply others; 1 for none (%(default)s)"
    _add(group, SamplingParams, "repetition_penalty", text, metavar="R")
    text = "subtract this from tokens in the output (%(default)s)"
    _add(group, SamplingParams, "presence_penalty", text, metavar="P")
    text = "subtract this from tokens in the output, as often as they occur there (%(default)s)"
    _add(group, SamplingParams, "frequency_penalty", text, metavar="P")
    text = "the output ends before this text; may be given several times"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    group.add_argument("--seed", type=int, metavar="N", help="key of the noise, 0 .. 2^64-1 (default: drawn at random)")
    _add_grammar(parser)


def _add_grammar(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output (docs/structured.md)").add_mutually_exclusive_group()
    group.add_argument("--json_schema", type=Path, metavar="FILE", help="the output is JSON that fits this schema")
    group.add_argument("--regex", metavar="REGEX", help="the output matches this as a whole")
    text = "the output is this text, or another one: give it several times"
    group.add_argument("--choice", action="append", metavar="TEXT", help=text)
    group.add_argument("--grammar", type=Path, metavar="FILE", help="the output keeps to this grammar, in Lark or GBNF")


def add_defaults(parser: argparse.ArgumentParser) -> None:
    """What a server does for requests that do not say; the same names as a client's flags."""
    group = parser.add_argument_group("defaults for requests that do not say")
    text = "where the checkpoint's generation_config.json says what the flags below do not: auto reads it (%(default)s)"
    group.add_argument("--generation_config", choices=["auto", "none"], default="auto", help=text)
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0; over HTTP 1, as OpenAI's)")
    group.add_argument("--top_k", type=int, metavar="K", help="keep the K likeliest tokens, 0 for all (0)")
    group.add_argument("--top_p", type=float, metavar="P", help="keep this much probability (1)")
    group.add_argument("--min_p", type=float, metavar="P", help="keep tokens of this share of the best one (0)")
    group.add_argument("--repetition_penalty", type=float, metavar="R", help="1 for none (1)")
    text = f"output tokens ({DEFAULT_MAX_NEW_TOKENS}; over HTTP as OpenAI has it)"
    group.add_argument("--max_new_tokens", type=int, metavar="N", help=text)


def add_trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time-line")
    text = "at the end, write a time-line of the model's steps in Chrome's trace format"
    group.add_argument("--trace", type=Path, metavar="FILE", help=text)


def add_reports(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reports")
    text = "at the end, write performance_<role>_<time>.csv and .json into the current directory"
    group.add_argument("--profile", action="store_true", help=text)
    levels = ["debug", "info", "warning", "error"]
    group.add_argument("--log_level", choices=levels, default="info", help="what goes to stderr (%(default)s)")
