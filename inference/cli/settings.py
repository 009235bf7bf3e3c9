"""From parsed flags to frozen configurations: the last file that sees an `argparse.Namespace`, besides the roles."""

from __future__ import annotations

import argparse
import json
import logging
import math
from dataclasses import fields, replace
from pathlib import Path

from inference.cli import flags
from inference.cli.prompts.source import PromptJob, read_prompts
from inference.config import (
    COMPILE_POLICIES,
    ConnectionConfig,
    DialSecurity,
    DraftConfig,
    HttpConfig,
    ModelConfig,
    NeuronOptions,
    ObserveConfig,
    PortSecurity,
    ProposerConfig,
    ServerConfig,
    check_batch,
)
from inference.errors import ConfigError, InvalidRequestError
from inference.request import GenerationRequest, Grammar, GrammarKind, RequestDefaults, SamplingParams, Schedule
from inference.workers.completion import CompletionRequest

logger = logging.getLogger(__name__)


def model_config(args: argparse.Namespace, path: Path, *, num_threads: int, neuron: NeuronOptions) -> ModelConfig:
    """What the flags say of a model; `num_threads` is used unless they name a number."""
    return ModelConfig(
        path=path,
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        sequence_length=args.sequence_length,
        num_slots=args.batch,
        num_threads=args.threads or num_threads,
        neuron=neuron,
        prefix_caching=args.prefix_caching,
        pass_s=args.emulate.target_s,
    )


def neuron_options(
    args: argparse.Namespace, *, gamma: int = 0, method: str | None = None, tp_degree: int | None = None
) -> NeuronOptions:
    """What the flags say of Neuron devices.

    Args:
        gamma: draft tokens that a compiled verification pass has room for; none for a draft, or a model alone.
        method: instead of the flag's.
        tp_degree: instead of the flag's.
    """
    method = method or args.speculation_method or "vanilla"
    tp_degree = tp_degree or args.tp_degree
    if "neuron" not in args.backend:
        if tp_degree > 1:
            logger.warning("tp_degree %d has no effect: backend %s does not shard a model", tp_degree, args.backend)
        if method != "vanilla" or args.neuron_config or args.device_sampling or args.compile != COMPILE_POLICIES[0]:
            neither = "--speculation_method, --neuron_config, --device_sampling nor --compile"
            raise ConfigError(f"backend {args.backend} takes neither {neither}")
    return NeuronOptions(
        tp_degree,
        gamma,
        method,
        args.neuron_config,
        args.compiled_model_path,
        args.neuron_cores,
        args.device_sampling,
        args.compile,
    )


def method_of_pair(args: argparse.Namespace, *, has_draft: bool) -> str | None:
    """Where both models are in one process, NxDI's fused graph is the method unless the flags name another."""
    if args.speculation_method is None and args.backend == "neuron" and has_draft:
        return "fused"
    return args.speculation_method  # type: ignore[no-any-return]


def proposer_config(
    args: argparse.Namespace, draft: str, *, tokenizer: Path, num_threads: int, neuron: NeuronOptions
) -> ProposerConfig:
    """What the flags say of the draft: a model directory, or ngram with the tokenizer of another model."""
    if draft == flags.NGRAM:
        return ProposerConfig(tokenizer, None, args.batch)
    model = model_config(args, Path(draft), num_threads=num_threads, neuron=neuron)
    model = replace(model, pass_s=args.emulate.draft_s)
    return ProposerConfig(model.path, model, args.batch)


def server_config(args: argparse.Namespace, port: int) -> ServerConfig:
    """Where the flags want a server to listen."""
    names = {field.name for field in fields(ServerConfig)} - {"host", "port", "defaults", "security"}
    others = {name: getattr(args, name) for name in names if name in args}
    return ServerConfig(args.host, port, security=_port_security(args), **others)


def _port_security(args: argparse.Namespace) -> PortSecurity:
    cert, key = args.tls_cert, args.tls_key
    if args.tls_self_signed is not None:
        if cert is not None:
            raise ConfigError("--tls_self_signed and --tls_cert: a server has one certificate")
        cert, key = _trial_certificate(args.tls_self_signed, args.host)
    client_ca, mtls_port = getattr(args, "tls_client_ca", None), getattr(args, "mtls_port", None)  # HTTP has neither
    return PortSecurity(cert, key, client_ca, mtls_port, args.auth_file, args.insecure)


def _trial_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    from inference.cli.trial import make_trial

    try:
        make_trial(folder, host)
    except OSError as exc:
        raise ConfigError(f"--tls_self_signed {folder}: {exc}") from exc
    return folder / "server.pem", folder / "server.key"


def dial_security(args: argparse.Namespace) -> DialSecurity:
    """What the flags show to servers, and whom they trust."""
    ours = (args.tls_client_cert, args.tls_client_key, args.tls_server_name)
    return DialSecurity(args.tls_ca, *ours, args.token_file, args.insecure)


def request_defaults(args: argparse.Namespace, model: Path) -> RequestDefaults:
    """What requests that do not say are to get: what the flags say, or else the checkpoint's generation_config.json.

    Raises:
        ConfigError: the file has a value that is outside its range.
        InvalidRequestError: a flag has.
    """
    names = [field.name for field in fields(RequestDefaults)]
    said = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    file = model / "generation_config.json"
    if args.generation_config == "none" or not file.is_file():
        return RequestDefaults(**said)
    stored = json.loads(file.read_text())
    try:
        RequestDefaults(**{name: stored[name] for name in names if stored.get(name) is not None})
    except (InvalidRequestError, TypeError) as exc:
        raise ConfigError(f"{file}: {exc}; --generation_config none does without it") from exc
    return RequestDefaults(**{name: stored[name] for name in names if stored.get(name) is not None} | said)


def connection_config(args: argparse.Namespace) -> ConnectionConfig:
    """Which server the flags name."""
    patience = (args.connect_timeout_s, args.deadline_s, args.reconnect_timeout_s)
    return ConnectionConfig(args.target_host, args.port, *patience, dial_security(args))


def draft_config(args: argparse.Namespace, *, max_waiting: int) -> DraftConfig:
    """How the flags want drafts made."""
    return DraftConfig(
        connection=connection_config(args),
        gamma=args.gamma,
        schedule=Schedule(args.schedule),
        max_waiting=max_waiting,
    )


def http_config(args: argparse.Namespace) -> HttpConfig:
    """How the flags want HTTP served."""
    return HttpConfig(
        port=args.http_port,
        per_token=args.stream_chunk == "token",
        served_model_name=args.served_model_name,
        max_body_bytes=round(args.max_body_mib * 2**20),
        page=not args.no_page,
        sse_ping_s=args.sse_ping_s,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )


def optional_http(args: argparse.Namespace) -> HttpConfig | None:
    """How the flags want HTTP served beside gRPC, if they name a port for it."""
    return None if args.http_port is None else http_config(args)


def observe_server(args: argparse.Namespace) -> ObserveConfig:
    """What the flags of a server with a model want to see of it."""
    return ObserveConfig(args.role, args.profile, args.trace, args.otlp_endpoint, args.metrics_port)


def prompt_job(args: argparse.Namespace, *, gamma: int | None = None, trace: Path | None = None) -> PromptJob:
    """Which prompts the flags want completed, and how."""
    return PromptJob(
        prompts=tuple(read_prompts(args.prompt, args.prompt_text)),
        template=_request_template(args, gamma),
        concurrency=check_batch(args.batch),
        as_json=args.format == "json",
        observe=ObserveConfig(args.role, args.profile, trace),
        deadline_s=vars(args).get("deadline_s", math.inf),  # one model alone is never full
    )


def _request_template(args: argparse.Namespace, gamma: int | None) -> CompletionRequest:
    """What the flags ask of every prompt.

    Raises:
        InvalidRequestError: a value is outside its range.
    """
    names = (field.name for field in fields(SamplingParams) if field.name not in ("seed", "logit_bias"))
    sampling = SamplingParams(seed=args.seed or 0, **{name: getattr(args, name) for name in names})
    GenerationRequest((0,), sampling, args.max_new_tokens, gamma=gamma)  # says now what is out of range
    return CompletionRequest(
        prompt="",
        sampling=sampling,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        gamma=gamma,
        stop=tuple(args.stop),
        grammar=_grammar(args),
    )


def _grammar(args: argparse.Namespace) -> Grammar | None:
    """What the output must look like, of the one flag that says so.

    Raises:
        ConfigError: a file cannot be read.
        InvalidRequestError: the grammar is empty or too long.
    """
    if args.regex is not None:
        return Grammar(GrammarKind.REGEX, args.regex)
    if args.choice is not None:
        return Grammar(GrammarKind.CHOICE, json.dumps(args.choice))
    for kind, path in ((GrammarKind.JSON_SCHEMA, args.json_schema), (GrammarKind.GRAMMAR, args.grammar)):
        if path is not None:
            return Grammar(kind, text_of(path))
    return None


def text_of(path: Path) -> str:
    """The grammar that a file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"grammar file {path} cannot be read: {exc}") from exc
