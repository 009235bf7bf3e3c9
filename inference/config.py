"""Settings of a process: frozen, validated once where they are built, passed in. Messages name value and limit."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from inference.errors import ConfigError
from inference.request import MAX_GAMMA, NO_DEFAULTS, RequestDefaults, Schedule

ROOT = Path(__file__).resolve().parent.parent
_INSTALLED = Path(sys.prefix) / "share" / "specdec"
_BUNDLED = ROOT if (ROOT / "models").is_dir() else _INSTALLED  # a wheel has no root of the project
BUNDLED_TARGET = _BUNDLED / "models" / "target"
BUNDLED_DRAFT = _BUNDLED / "models" / "draft"
BUNDLED_PROMPTS = _BUNDLED / "prompts" / "demo.txt"

DTYPES = ("float32", "bfloat16", "float16", "int8")
"""int8: linear layers only, in backend onnx."""

CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")
"""auto: by the model's chat template."""
REASONING_PARSERS = ("auto", "think", "none")
COMPILE_POLICIES = ("auto", "never", "only")
SPECULATION_METHODS = ("vanilla", "fused", "eagle", "eagle3", "medusa")
"""vanilla: our own engine verifies; in all others NxDI's compiled graph drafts and verifies."""


DRAINS = ("move", "wait")
"""move: they go there, unless they end within a second; wait: like all others they have their grace."""

DEFAULT_BRANCHES = 3
MAX_BRANCHES = 16
"""Branches of one sequence at once; each has a slot of the draft model."""
DEFAULT_GAMMA = 8
"""Draft tokens per round, per pass at most in run-ahead, or per pass of a compiled graph."""
FUSED_GAMMA = 16
"""Draft tokens per pass at most where draft and target take turns in one process: as many are drafted as pay."""
DEFAULT_WORKER_SLOTS = 256
"""Sessions that one worker of the pool is given at most, whatever it claims to have room for."""
MAX_PASS_MS = 10_000.0
"""Of a pass that is emulated."""

_DNS, _FILE = "dns:///", "file:///"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_model(path: Path) -> None:
    what = "no config.json there" if path.is_dir() else "no such directory, and no id of the hub (NAMESPACE/NAME)"
    _require((path / "config.json").is_file(), f"model {path}: {what}")


def check_batch(batch: int) -> int:
    """Return the number of sequences in flight; raise ConfigError if it is out of range."""
    _require(1 <= batch <= 4096, f"batch {batch} is outside 1..4096")
    return batch


def check_gamma(gamma: int) -> int:
    """Return the speculation length; raise ConfigError if it is out of range."""
    _require(0 <= gamma <= MAX_GAMMA, f"gamma {gamma} is outside 0..{MAX_GAMMA}")
    return gamma


def check_branches(branches: int) -> int:
    """Return the number of branches beside a chain; raise ConfigError if it is out of range."""
    _require(0 <= branches <= MAX_BRANCHES, f"branches {branches} is outside 0..{MAX_BRANCHES}")
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
class NeuronOptions:
    """Settings that only models compiled for AWS Neuron devices have.

    Attributes:
        tp_degree: logical NeuronCores that a model is sharded over.
        gamma: draft tokens that a compiled verification pass has room for; 0 compiles none, as for a draft.
        method: one of SPECULATION_METHODS.
        overrides: further parameters of NxDI's NeuronConfig, by name.
        artifacts: folder of compiled models; None is a folder in the user's cache.
        compile_policy: one of COMPILE_POLICIES: "never" refuses what is not there, where others compile it.
        cores: NeuronCores of this process, such as 0-3,8; None is what NEURON_RT_VISIBLE_CORES says.
        device_sampling: the device chooses tokens where the host could: less traffic, and less that a request may ask.
    """

    tp_degree: int = 1
    gamma: int = 0
    method: str = "vanilla"
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    artifacts: Path | None = None
    cores: str | None = None
    device_sampling: bool = False
    compile_policy: str = "auto"

    def __post_init__(self) -> None:
        _require(self.tp_degree >= 1, f"tp_degree {self.tp_degree} is below 1")
        check_gamma(self.gamma)
        methods = ", ".join(SPECULATION_METHODS)
        _require(self.method in SPECULATION_METHODS, f"speculation_method {self.method} is none of {methods}")
        policies = ", ".join(COMPILE_POLICIES)
        _require(self.compile_policy in COMPILE_POLICIES, f"compile {self.compile_policy} is none of {policies}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to load and how much room to give it.

    Attributes:
        path: a Hugging Face directory (config.json, *.safetensors, tokenizer.json).
        backend: name in `inference.backends.registry`.
        device: torch device string, such as "cpu" or "cuda:0"; "auto" takes CUDA where there is one.
        dtype: arithmetic of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere.
        sequence_length: positions per slot; None takes the model's own limit, at most 2048.
        num_slots: sequences that can be in flight at once.
        num_threads: CPU threads of a forward pass; 0 takes the number of cores this process may use.
        neuron: for backends of Neuron devices alone.
        prefix_caching: whether requests begin with what earlier ones have left in the slots.
        pass_s: seconds that a pass takes at least, asleep; see `Emulation`.
    """

    path: Path
    backend: str = "torch"
    device: str = "auto"
    dtype: str = "auto"
    sequence_length: int | None = None
    num_slots: int = 8
    num_threads: int = 0
    neuron: NeuronOptions = field(default_factory=NeuronOptions)
    prefix_caching: bool = True
    pass_s: float = 0.0

    @property
    def name(self) -> str:
        """As clients know it."""
        return model_name(self.path)

    def __post_init__(self) -> None:
        _require_model(self.path)
        _require(self.dtype in ("auto", *DTYPES), f"dtype {self.dtype} is none of auto, {', '.join(DTYPES)}")
        length = self.sequence_length
        _require(length is None or length >= 2, f"sequence_length {length} is below 2")
        check_batch(self.num_slots)
        _require(self.num_threads >= 0, f"threads {self.num_threads} is below 0")
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
    num_slots: int
    branches: int = 0

    def __post_init__(self) -> None:
        _require_model(self.tokenizer_path)
        check_batch(self.num_slots)
        check_branches(self.branches)


@dataclass(frozen=True, slots=True)
class DialSecurity:
    """Whom a client trusts, and what it shows; files are PEM, and read again when they change.

    Attributes:
        ca: of the CAs that servers' certificates may come from; None dials in plain text.
        cert, key: the client's own certificate; None shows none.
        server_name: what the server's certificate must name; None: the host that is dialled.
        token_file: holds the token to send.
        insecure: send it in plain text over a network, too.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    token_file: Path | None = None
    insecure: bool = False

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
        host: of one server, or several comma-separated: HOST, HOST:PORT, dns:///NAME[:PORT] for all of a name, or
            file:///PATH for all that a file lists.
        port: of those that name none.
        connect_timeout_s: seconds to wait for the server at start.
        deadline_s: seconds a request may take.
        reconnect_timeout_s: seconds after a lost link within which a request goes on; 0 gives up at once.
    """

    host: str
    port: int
    connect_timeout_s: float = 10.0
    deadline_s: float = 600.0
    reconnect_timeout_s: float = 30.0
    security: DialSecurity = PLAIN

    def __post_init__(self) -> None:
        _require(1 <= self.port <= 65535, f"port {self.port} is outside 1..65535")
        _require(bool(self.targets), "target_host names no server")
        for target in self.targets:
            self.security.check(target)
        _require(self.reconnect_timeout_s >= 0, f"reconnect_timeout_s {self.reconnect_timeout_s} is below 0")
        _require(self.connect_timeout_s > 0, f"connect_timeout_s {self.connect_timeout_s} is not above 0")
        _require(self.deadline_s > 0, f"deadline_s {self.deadline_s} is not above 0")

    @property
    def targets(self) -> tuple[str, ...]:
        """HOST:PORT, dns:///NAME:PORT or file:///PATH of each."""
        return targets(self.host, self.port)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """How a draft worker drafts, and for whom.

    Attributes:
        connection: to the target.
        gamma: draft tokens per round, or per pass at most in run-ahead.
        schedule: who waits for whom.
        max_waiting: requests that may queue for a slot of the draft model.
    """

    connection: ConnectionConfig
    gamma: int = DEFAULT_GAMMA
    schedule: Schedule = Schedule.ASYNC
    max_waiting: int = 64

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        _require(self.max_waiting >= 0, f"max_waiting {self.max_waiting} is below 0")


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Both models of one process.

    Attributes:
        gamma: draft tokens of one session in one pass at most.
        adaptive_gamma: draft only as many of them as pay; in a compiled graph, it is always gamma.
    """

    target: ModelConfig
    draft: ProposerConfig
    gamma: int = FUSED_GAMMA
    adaptive_gamma: bool = True

    def __post_init__(self) -> None:
        check_gamma(self.gamma)


@dataclass(frozen=True, slots=True)
class PortSecurity:
    """How a server's ports are protected; files are read again when they change.

    Attributes:
        cert, key: PEM, the server's certificate with its chain, and its key; None is plain text.
        client_ca: PEM of the CAs that clients' certificates may come from, at `mtls_port`.
        mtls_port: a further port of gRPC, for clients with a certificate.
        auth_file: who may do what; None lets in whoever reaches a port.
        insecure: plain text also where others can listen.
    """

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    mtls_port: int | None = None
    auth_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
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
        host, port: port 0 takes a free one.
        max_waiting: requests that may queue for a slot.
        idle_timeout_s: seconds a session may hold its slot without a proposal.
        grace_s: seconds that running requests get on SIGTERM.
        defaults: for requests that do not say; of a draft worker or gateway, the target's own count instead.
        drain: one of DRAINS, what becomes of requests on SIGTERM whose callers have another server to go on at.
        drain_delay_s: seconds before that, in which the server says that it is not ready, and still takes requests.
        stall_timeout_s: seconds that a peer may read nothing while there is something to read.
        pass_timeout_s: seconds after which a pass of the model counts as one that may never end.
        max_worker_slots: sessions that one worker of the pool is given at most.
        lookup: a target proposes from a request's own tokens where a pass has no draft tokens.
        probe_port: answers /livez and /readyz over plain HTTP, to anybody; None does not.
        ready_json: write a line of JSON to stdout when all ports are open, with what they are.
        lifeline: "stdin" drains when stdin ends, as on SIGTERM; None does not look.
        security: of all other ports.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_waiting: int = 64
    idle_timeout_s: float = 60.0
    grace_s: float = 10.0
    defaults: RequestDefaults = NO_DEFAULTS
    drain_delay_s: float = 0.0
    stall_timeout_s: float = 30.0
    pass_timeout_s: float = 60.0
    drain: str = "move"
    max_worker_slots: int = DEFAULT_WORKER_SLOTS
    lookup: bool = True
    probe_port: int | None = None
    ready_json: bool = False
    lifeline: str | None = None
    security: PortSecurity = OPEN

    def __post_init__(self) -> None:
        _require(self.drain in DRAINS, f"drain {self.drain} is none of {', '.join(DRAINS)}")
        is_safe = self.on_loopback or self.security.cert is not None or self.security.insecure
        ways = "--tls_cert and --tls_key (or --tls_self_signed DIR) encrypt, --insecure serves all the same"
        _require(is_safe, f"host {self.host} is not loopback, and others could read along in plain text: {ways}")
        _require(0 <= self.port <= 65535, f"port {self.port} is outside 0..65535")
        _require(self.max_waiting >= 0, f"max_waiting {self.max_waiting} is below 0")
        _require(self.max_worker_slots >= 1, f"max_worker_slots {self.max_worker_slots} is below 1")
        _require(self.idle_timeout_s > 0, f"idle_timeout_s {self.idle_timeout_s} is not above 0")
        for name in ("grace_s", "drain_delay_s"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} {value} is below 0")
            _require(math.isfinite(value), f"{name} {value} is not finite")
        _require(self.stall_timeout_s > 0, f"stall_timeout_s {self.stall_timeout_s} is not above 0")
        _require(self.pass_timeout_s > 0, f"pass_timeout_s {self.pass_timeout_s} is not above 0")

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def ends_by_call(self) -> bool:
        """Whether a call may drain it: nobody but this machine can send one, or a file says who may."""
        return self.on_loopback or self.security.auth_file is not None


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """How OpenAI's API is served over HTTP.

    Attributes:
        port: 0 takes a free one.
        per_token: a stream's event carries one token; else all tokens of a target pass.
        served_model_name: None is the name of the model's directory.
        max_body_bytes: of a request.
        page: whether there is a page at /.
        deadline_s: seconds a request may take.
        sse_ping_s: seconds after which a stream in which nothing happens gets an empty chunk; 0: never.
        tool_call_parser: one of CALL_PARSERS: how the model writes calls of functions.
        reasoning_parser: one of REASONING_PARSERS: how it marks what it thinks.
    """

    port: int = 0
    per_token: bool = True
    served_model_name: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    page: bool = True
    deadline_s: float = 600.0
    sse_ping_s: float = 0.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        _require(self.sse_ping_s >= 0, f"sse_ping_s {self.sse_ping_s} is below 0")
        _require(0 <= self.port <= 65535, f"http_port {self.port} is outside 0..65535")
        _require(self.max_body_bytes > 0, f"max_body {self.max_body_bytes} bytes is not above 0")
        _require(self.deadline_s > 0, f"deadline_s {self.deadline_s} is not above 0")


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """What a process shows of its work, each if it is asked for.

    Attributes:
        role: of the process; names its files and spans.
        profile: write a profile of all requests at the end.
        timeline: file for a time-line of the model's steps.
        otlp_endpoint: URL of the collector of OpenTelemetry spans; None is what the environment says.
        metrics_port: serve Prometheus metrics there.
    """

    role: str
    profile: bool = False
    timeline: Path | None = None
    otlp_endpoint: str | None = None
    metrics_port: int | None = None


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
