"""Configurations of a process: frozen, validated once where they are built, passed in. Messages name value and limit.

A field that an operator sets says its flag too: see `inference/settings.py`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from inference.errors import ConfigError
from inference.request import GAMMA, NO_DEFAULTS, RequestDefaults, Schedule
from inference.settings import FINITE, REQUIRED, Checked, Range, check, group, same, setting

ROOT = Path(__file__).resolve().parent.parent
# A wheel has no root of the project.
_BUNDLED = ROOT if (ROOT / "models").is_dir() else Path(sys.prefix) / "share" / "specdec"
BUNDLED_TARGET = _BUNDLED / "models" / "target"
BUNDLED_DRAFT = _BUNDLED / "models" / "draft"
BUNDLED_PROMPTS = _BUNDLED / "prompts" / "demo.txt"

DTYPES = ("float32", "bfloat16", "float16", "int8")
"""int8: linear layers only, in backend onnx."""

COMPILE_POLICIES = ("auto", "never", "only")
SPECULATION_METHODS = ("vanilla", "fused", "eagle", "eagle3", "medusa")
"""vanilla: our own engine verifies; in all others NxDI's compiled graph drafts and verifies."""

DEFAULT_BRANCHES = 3
DEFAULT_GAMMA = 8
"""Draft tokens per round, per pass at most in run-ahead, or per pass of a compiled graph."""
FUSED_GAMMA = 16
"""Draft tokens per pass at most where draft and target take turns in one process: as many are drafted as pay."""
DEFAULT_WORKER_SLOTS = 256
"""Sessions that one worker of the pool is given at most, whatever it claims to have room for."""
DEFAULT_PORT = 50051
DEFAULT_SERVE_PORT = 50052
"""Of a draft worker."""
MAX_PASS_MS = 10_000.0
"""Of a pass that is emulated."""

BATCH = Range(1, 4096)
"""Sequences in flight at once."""
BRANCHES = Range(0, 16)
"""Branches of one sequence at once; each has a slot of the draft model."""
PORT = Range(0, 65535)
"""Ports to listen on; 0 takes a free one."""
SECONDS = Range(0.0, above=True)
COUNT = Range(0)
NEURON = "AWS Neuron devices (backend neuron)"
REPLICAS = ", or several replicas: HOST[:PORT],..., dns:///NAME[:PORT] or a list in file:///PATH"
SERVICE_FLAGS = ("metrics_port", "otlp_endpoint")
"""Flags of `ObserveConfig` that a role without a server lacks."""

_DNS, _FILE = "dns:///", "file:///"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_model(path: Path) -> None:
    what = "no config.json there" if path.is_dir() else "no such directory, and no id of the hub (NAMESPACE/NAME)"
    _require((path / "config.json").is_file(), f"model {path}: {what}")


def check_branches(branches: int) -> int:
    """Return the number of branches beside a chain; raise ConfigError if it is out of range."""
    _require(branches in BRANCHES, f"branches {branches} {BRANCHES.fault(branches)}")
    return branches


@dataclass(frozen=True, slots=True)
class Emulation:
    """How many seconds passes take at least, asleep, as on a device whose host is idle; 0: what they take here."""

    target_s: float = 0.0
    draft_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `target:25ms,draft:3ms`, or one of the two.

        Raises:
            ConfigError: it is something else, or a pass would be longer than MAX_PASS_MS.
        """
        parts = [re.fullmatch(r"(target|draft):(\d+(?:\.\d+)?)ms", part.strip()) for part in text.split(",")]
        given = {part[1]: float(part[2]) for part in parts if part}
        _require(len(given) == len(parts), f"{text}: say target:25ms,draft:3ms, or one of the two")
        for name, milliseconds in given.items():
            limit = f"{name}:{milliseconds:g}ms is above {MAX_PASS_MS:g}ms"
            _require(milliseconds <= MAX_PASS_MS, limit)
        return cls(**{f"{name}_s": milliseconds / 1e3 for name, milliseconds in given.items()})

    def __str__(self) -> str:
        """As `parse` reads it."""
        given = (("target", self.target_s), ("draft", self.draft_s))
        return ",".join(f"{name}:{seconds * 1e3:g}ms" for name, seconds in given if seconds)


NOT_EMULATED = Emulation()


@dataclass(frozen=True, slots=True)
class NeuronOptions(Checked):
    """Settings that only models compiled for AWS Neuron devices have.

    Attributes:
        tp_degree: logical NeuronCores that a model is sharded over.
        gamma: draft tokens that a compiled verification pass has room for; 0 compiles none, as for a draft.
        method: one of SPECULATION_METHODS.
        overrides: further parameters of NxDI's NeuronConfig, as a JSON object; several are merged.
        artifacts: folder of compiled models (default: $NEURON_COMPILED_ARTIFACTS, or one in the user's cache).
        cores: NeuronCores of this process, such as 0-3,8 (default: $NEURON_RT_VISIBLE_CORES, or all).
        device_sampling: let the device choose tokens where the host could (fused, or a target alone): less traffic,
            but fused is then greedy, and a target alone takes no seeds.
        compile_policy: what is not compiled yet: auto compiles it, never refuses, only compiles and ends.
    """

    SECTION: ClassVar = NEURON

    tp_degree: int = setting(1, "--tp_degree N", within=Range(1))
    gamma: int = setting(0, within=GAMMA)
    method: str = setting("vanilla", "--speculation_method", choices=SPECULATION_METHODS)
    overrides: Mapping[str, Any] = setting({}, "--neuron_config JSON")
    artifacts: Path | None = setting(None, "--compiled_model_path DIR")
    cores: str | None = setting(None, "--neuron_cores LIST")
    device_sampling: bool = setting(False, "--device_sampling")
    compile_policy: str = setting(COMPILE_POLICIES[0], "--compile", choices=COMPILE_POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Checked):
    """Arithmetic, room and threads that a process gives to each model it loads.

    Attributes:
        backend: inference engine: torch, onnx, neuron, ... (%(default)s: the fastest exact one).
        device: auto, cpu, cuda, cuda:N (%(default)s: CUDA where there is one).
        dtype: arithmetic (%(default)s: float32 on CPU, bfloat16 elsewhere; int8: linear layers, backend onnx).
        sequence_length: prompt and output together (default: the model's limit, at most 2048).
        num_slots: sequences in flight at once.
        num_threads: CPU threads of a pass (default: the cores this process may use, less one on a target that
            shares the machine with its draft, that is, listens on loopback; a draft takes one).
        prefix_caching: begin a request with what earlier ones have left in the slots, as far as it is the same.
    """

    backend: str = setting("auto", "--backend")
    device: str = setting("auto", "--device")
    dtype: str = setting("auto", "--dtype", choices=("auto", *DTYPES))
    sequence_length: int | None = setting(None, "--sequence_length TOKENS", within=Range(2))
    num_slots: int = setting(8, "--batch N", within=BATCH)
    num_threads: int = setting(0, "--threads N", within=COUNT)
    prefix_caching: bool = setting(True, "--prefix_caching")
    neuron: NeuronOptions = group(NeuronOptions)


@dataclass(frozen=True, slots=True)
class ModelConfig(Loading):
    """Which model to load, and how.

    Attributes:
        path: a Hugging Face directory (config.json, *.safetensors, tokenizer.json).
        backend: name in `inference.backends.registry`; where no command line says, the reference.
        pass_s: seconds that a pass takes at least, asleep; see `Emulation`.
    """

    path: Path
    backend: str = field(default="torch", kw_only=True)
    pass_s: float = 0.0

    @property
    def name(self) -> str:
        """As clients know it."""
        return model_name(self.path)

    def __post_init__(self) -> None:
        _require_model(self.path)
        check(self)
        emulable = not self.pass_s or "neuron" not in self.backend
        _require(emulable, f"backend {self.backend} has a device: --emulate is for those that compute on the host")


@dataclass(frozen=True, slots=True)
class ProposerConfig:
    """What drafts: a model, or nothing but the sequence itself (prompt lookup).

    Attributes:
        tokenizer_path: directory of the tokenizer and config.json whose vocabulary is drafted in.
        model: None looks drafts up.
        num_slots: sequences drafted at once.
        branches: of each sequence, for which the model gets further slots.
    """

    tokenizer_path: Path
    model: ModelConfig | None
    num_slots: int = setting(REQUIRED, "--batch", within=BATCH)
    branches: int = setting(0, within=BRANCHES)

    def __post_init__(self) -> None:
        _require_model(self.tokenizer_path)
        check(self)


@dataclass(frozen=True, slots=True)
class DialSecurity:
    """Whom a client trusts, and what it shows; files are PEM, and read again when they change.

    Attributes:
        ca: dial with TLS; the server's certificate must come from one of these CAs (PEM).
        cert: certificate to show (PEM).
        key: its key (PEM).
        server_name: name that must be in the server's certificate (default: the host that is dialled).
        token_file: file with the token to send.
        insecure: allow plain text where others could read along: another host than loopback.
    """

    SECTION: ClassVar = "security of connections (docs/security.md)"

    ca: Path | None = setting(None, "--tls_ca FILE")
    cert: Path | None = setting(None, "--tls_client_cert FILE")
    key: Path | None = setting(None, "--tls_client_key FILE")
    server_name: str | None = setting(None, "--tls_server_name NAME")
    token_file: Path | None = setting(None, "--token_file FILE")
    insecure: bool = setting(False, "--insecure")

    def __post_init__(self) -> None:
        _require((self.cert is None) == (self.key is None), "--tls_client_cert and --tls_client_key go together")
        for name, value in (("client_cert", self.cert), ("server_name", self.server_name)):
            _require(value is None or self.ca is not None, f"--tls_{name} without --tls_ca: nothing would be encrypted")

    def check(self, target: str) -> None:
        """Raise ConfigError if dialling one of `targets` would give the token away."""
        host = target if target.startswith(_FILE) else target.removeprefix(_DNS).rpartition(":")[0]
        is_safe = self.token_file is None or self.ca is not None or self.insecure or is_loopback(host)
        ways = "--tls_ca encrypts it; --insecure sends it all the same"
        _require(is_safe, f"the token would go to {host} in plain text: {ways}")


PLAIN = DialSecurity()


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Which servers a client dials, replicas of one model, how patient it is, and what it shows.

    Attributes:
        port: the port of hosts without one.
        connect_timeout_s: wait for the server at start.
        deadline_s: time a request may take.
        reconnect_timeout_s: a request whose server is lost goes on within this time, at another one or there.
    """

    SECTION: ClassVar = "connection"

    host: str = setting("127.0.0.1", "--target_host HOST", help=f"host of the server{REPLICAS}")
    port: int = setting(DEFAULT_PORT, "--port PORT", within=Range(1, 65535))
    connect_timeout_s: float = setting(10.0, "--connect_timeout_s S", within=SECONDS)
    deadline_s: float = setting(600.0, "--deadline_s S", within=SECONDS)
    reconnect_timeout_s: float = setting(30.0, "--reconnect_timeout_s S", within=Range(0.0))
    security: DialSecurity = group(DialSecurity)

    def __post_init__(self) -> None:
        check(self)
        _require(bool(self.targets), "target_host names no server")
        for target in self.targets:
            self.security.check(target)

    @property
    def targets(self) -> tuple[str, ...]:
        """HOST:PORT, dns:///NAME:PORT or file:///PATH of each."""
        return targets(self.host, self.port)


@dataclass(frozen=True, slots=True)
class DraftConfig(Checked):
    """How a draft worker drafts, and for whom.

    Attributes:
        connection: to the target.
        gamma: draft tokens per round, 0 for none.
        schedule: async: run ahead of the target, which decodes by itself meanwhile; sync: draft, send, wait.
        max_waiting: requests that may queue for a slot of the draft model.
    """

    connection: ConnectionConfig = group(ConnectionConfig)
    gamma: int = setting(DEFAULT_GAMMA, "--gamma --speculation_length N", section="speculation", within=GAMMA)
    schedule: Schedule = setting(Schedule.ASYNC, "--schedule", section="link to the target")
    max_waiting: int = setting(64, within=COUNT)


@dataclass(frozen=True, slots=True)
class FusedConfig(Checked):
    """Both models of one process.

    Attributes:
        gamma: draft tokens of one session in one pass at most.
        adaptive_gamma: draft only as many of gamma tokens as pay, by the draft's confidence and the measured times;
            a compiled graph always drafts gamma.
    """

    target: ModelConfig
    draft: ProposerConfig
    gamma: int = setting(
        FUSED_GAMMA,
        "--gamma --speculation_length N",
        help="draft tokens per pass at most, as many as pay; 0 for none "
        f"(default: {FUSED_GAMMA}; where draft and target are one compiled graph, always so many: {DEFAULT_GAMMA})",
        section="speculation",
        within=GAMMA,
    )
    adaptive_gamma: bool = setting(True, "--adaptive_gamma", section="speculation length")


@dataclass(frozen=True, slots=True)
class PortSecurity:
    """How a server's ports are protected; files are read again when they change.

    Attributes:
        cert: the server's certificate, with its chain (PEM).
        key: its key (PEM).
        client_ca: CAs of clients' certificates (PEM), for --mtls_port.
        mtls_port: a further port of gRPC, for clients with a certificate (default: nowhere).
        auth_file: who may do what (TOML); from then on, nobody else may do anything (default: everybody may).
        insecure: allow plain text where others could read along: another host than loopback.
        self_signed: instead of --tls_cert and --tls_key, for a trial: make a CA and certificates in this folder,
            unless it has them, and use them.
    """

    SECTION: ClassVar = "security of ports (docs/security.md)"

    cert: Path | None = setting(None, "--tls_cert FILE")
    key: Path | None = setting(None, "--tls_key FILE")
    client_ca: Path | None = setting(None, "--tls_client_ca FILE")
    mtls_port: int | None = setting(None, "--mtls_port PORT", within=PORT)
    auth_file: Path | None = setting(None, "--auth_file FILE")
    insecure: bool = setting(False, "--insecure")
    self_signed: Path | None = setting(None, "--tls_self_signed DIR")

    def __post_init__(self) -> None:
        check(self)
        if self.self_signed is not None:
            _require(self.cert is None, "--tls_self_signed and --tls_cert: a server has one certificate")
            object.__setattr__(self, "cert", self.self_signed / "server.pem")
            object.__setattr__(self, "key", self.self_signed / "server.key")
        _require((self.cert is None) == (self.key is None), "--tls_cert and --tls_key go together")
        both = (self.client_ca is None) == (self.mtls_port is None)
        _require(both, "--tls_client_ca and --mtls_port go together: clients' certificates have a port of their own")
        needs = self.mtls_port is None or (self.cert is not None and self.auth_file is not None)
        _require(needs, "--mtls_port needs --tls_cert and --tls_key, and --auth_file, which says who may do what")


OPEN = PortSecurity()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where a server listens and how much it takes on.

    Attributes:
        host: address to listen on (%(default)s; 0.0.0.0 for all).
        port: port to listen on, 0 for a free one.
        max_waiting: requests queued for a slot.
        idle_timeout_s: end a session that has had no proposal for this long.
        grace_s: on SIGTERM, time for running requests.
        defaults: for requests that do not say; of a draft worker or gateway, the target's own count instead.
        drain_delay_s: before that, time in which balancers hear that this server is not ready; it still serves.
        stall_timeout_s: drop a client that has read nothing for this long.
        pass_timeout_s: not ready, and not alive, while a pass of the model takes longer than this.
        drain: on SIGTERM, requests whose callers have another server go on there after a second, with the same
            tokens, or wait for their end like all others.
        max_worker_slots: sessions that one worker of the pool is given at most, whatever it claims to have room for.
        lookup: propose what followed a request's last tokens where they stood before, as wide as pays.
        probe_port: answer /livez and /readyz over plain HTTP on this port, to anybody (default: nowhere).
        ready_json: when all ports are open, write one line of JSON to stdout, with the ports that 0 became.
        lifeline: also drain, as on SIGTERM, when stdin ends: when whoever holds its other end is gone.
        security: of all ports but `probe_port`.
    """

    SECTION: ClassVar = "server"

    host: str = setting("127.0.0.1", "--host")
    port: int = setting(DEFAULT_PORT, "--port PORT", within=PORT)
    max_waiting: int = setting(64, "--max_waiting N", within=COUNT)
    idle_timeout_s: float = setting(60.0, "--idle_timeout_s S", section="sessions of draft workers", within=SECONDS)
    grace_s: float = setting(10.0, "--grace_s S", within=Range(0.0, FINITE))
    defaults: RequestDefaults = NO_DEFAULTS
    drain_delay_s: float = setting(0.0, "--drain_delay_s S", within=Range(0.0, FINITE))
    stall_timeout_s: float = setting(30.0, "--stall_timeout_s S", within=SECONDS)
    pass_timeout_s: float = setting(60.0, "--pass_timeout_s S", section="watchdog", within=SECONDS)
    drain: str = setting("move", "--drain", choices=("move", "wait"))
    max_worker_slots: int = setting(
        DEFAULT_WORKER_SLOTS, "--max_worker_slots N", section="sessions of draft workers", within=Range(1)
    )
    lookup: bool = setting(True, "--lookup", section="passes without draft tokens")
    probe_port: int | None = setting(None, "--probe_port PORT", within=PORT)
    ready_json: bool = setting(False, "--ready_json")
    lifeline: str | None = setting(None, "--lifeline", choices=("stdin",))
    security: PortSecurity = group(PortSecurity)

    def __post_init__(self) -> None:
        check(self)
        is_safe = self.on_loopback or self.security.cert is not None or self.security.insecure
        ways = "--tls_cert and --tls_key (or --tls_self_signed DIR) encrypt, --insecure serves all the same"
        _require(is_safe, f"host {self.host} is not loopback, and others could read along in plain text: {ways}")

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def ends_by_call(self) -> bool:
        """Whether a call may drain it: nobody but this machine can send one, or a file says who may."""
        return self.on_loopback or self.security.auth_file is not None


@dataclass(frozen=True, slots=True)
class HttpConfig(Checked):
    """How OpenAI's API is served over HTTP.

    Attributes:
        port: port of the HTTP server.
        stream_chunk: what a stream's event carries: one token, or all tokens of a target pass.
        served_model_name: name of the model (default: its directory's).
        max_body_mib: largest request body in MiB.
        sse_ping_s: give a stream that is silent for this long an empty chunk, for proxies that would end it; 0:
            never.
        no_page: no page at /.
        tool_call_parser: how the model writes calls of tools; auto: as its chat template says.
        reasoning_parser: split <think>...</think> off as reasoning_content; auto: where the chat template has it.
        deadline_s: seconds a request may take.
    """

    SECTION: ClassVar = "OpenAI-compatible HTTP"

    port: int = setting(0, "--http_port PORT", within=PORT)
    stream_chunk: str = setting("token", "--stream_chunk", choices=("token", "pass"))
    served_model_name: str | None = setting(None, "--served_model_name NAME")
    max_body_mib: float = setting(8.0, "--max_body_mib MIB", within=Range(0.0, FINITE, above=True))
    sse_ping_s: float = setting(0.0, "--sse_ping_s S", within=Range(0.0))
    no_page: bool = setting(False, "--no_page")
    tool_call_parser: str = setting("auto", "--tool_call_parser", choices=("auto", "hermes", "llama3_json", "none"))
    reasoning_parser: str = setting("auto", "--reasoning_parser", choices=("auto", "think", "none"))
    deadline_s: float = setting(600.0, within=SECONDS)

    @property
    def per_token(self) -> bool:
        """True if a stream's event carries one token, False if all tokens of a pass."""
        return self.stream_chunk == "token"

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        return round(self.max_body_mib * 2**20)


OPTIONAL_HTTP_PORT = same(HttpConfig, "port", default=None, help="port of the HTTP server; without it there is none")
"""For servers of gRPC, which serve HTTP only if a port is named."""


@dataclass(frozen=True, slots=True)
class ObserveConfig(Checked):
    """What a process shows of its work, each if it is asked for.

    Attributes:
        role: of the process; names its files and spans.
        metrics_port: serve Prometheus metrics at /metrics of this port, on the server's host (default: nowhere).
        otlp_endpoint: send OpenTelemetry traces of requests to this collector, such as http://localhost:4317
            (default: nowhere).
        timeline: at the end, write a time-line of the model's steps in Chrome's trace format.
        profile: at the end, write performance_<role>_<time>.csv and .json into the current directory.
        log_level: what goes to stderr.
    """

    role: str
    metrics_port: int | None = setting(None, "--metrics_port PORT", section="metrics", within=PORT)
    otlp_endpoint: str | None = setting(None, "--otlp_endpoint URL", section="traces")
    timeline: Path | None = setting(None, "--trace FILE", section="time-line")
    profile: bool = setting(False, "--profile", section="reports")
    log_level: str = setting("info", "--log_level", choices=("debug", "info", "warning", "error"), section="reports")


def targets(text: str, port: int | None = None) -> tuple[str, ...]:
    """HOST:PORT, dns:///NAME:PORT or file:///PATH of servers that are named with commas between them, each once.

    Args:
        port: of those that name none; None: each must.

    Raises:
        ConfigError: naming the one that is none of these.
    """
    return tuple(dict.fromkeys(_target(where.strip(), port) for where in text.split(",") if where.strip()))


def _target(where: str, default_port: int | None) -> str:
    if where.startswith(_FILE):
        return where
    scheme = _DNS if where.startswith(_DNS) else ""
    host, _, port = (text := where.removeprefix(scheme)).rpartition(":")
    if not host or (":" in host and not host.endswith("]")):  # no port, or a bare IPv6 address
        host, port = text, "" if default_port is None else str(default_port)
    is_plain = bool(host.strip("[]")) and "/" not in host and port.isdigit() and 1 <= int(port) <= 65535
    form = "HOST:PORT, dns:///NAME:PORT" if default_port is None else "HOST, HOST:PORT, dns:///NAME[:PORT]"
    _require(is_plain, f"{where!r} is not {form}, with a port in 1..65535, or file:///PATH")
    return scheme + address(host.strip("[]"), int(port))


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a host: localhost, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def model_name(path: Path) -> str:
    """As clients know a model: its directory's name, or the id of one in the hub's cache.

    There the path ends with models--NAMESPACE--NAME/snapshots/REVISION.
    """
    *_, repository, snapshots, _ = ("", "", *path.parts)
    if snapshots == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def usable_core_ids() -> list[int]:
    """CPU cores that this process may use, by number."""
    return sorted(os.sched_getaffinity(0))


def usable_cores() -> int:
    """How many CPU cores this process may use."""
    return len(usable_core_ids())
