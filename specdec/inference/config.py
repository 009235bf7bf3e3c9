"""Configurations of a process: frozen dataclasses that are checked when they are made, and then passed on.

A field that an operator sets declares its flag too: see `inference/settings.py`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError
from specdec.inference.request import GAMMA, NO_DEFAULTS, RequestDefaults, Schedule
from specdec.inference.settings import FINITE, REQUIRED, Checked, Range, check, group, same, setting

ROOT = Path(__file__).resolve().parents[2]
# A wheel has no root of the project: there this is the folder of all packages.
_BUNDLED = ROOT if (ROOT / "models" / "target").is_dir() else Path(sys.prefix) / "share" / "specdec"
BUNDLED_TARGET = _BUNDLED / "models" / "target"
BUNDLED_DRAFT = _BUNDLED / "models" / "draft"
BUNDLED_PROMPTS = _BUNDLED / "prompts" / "demo.txt"

DTYPES = ("float32", "bfloat16", "float16", "int8")
"""Arithmetics in which a model can compute; int8 is for linear layers only, in backend onnx."""

COMPILE_POLICIES = ("auto", "never", "always", "only")
MTP = "mtp"
SPECULATION_METHODS = ("vanilla", "fused", "eagle", "eagle3", "medusa", MTP)
"""Speculation methods on AWS Neuron: with vanilla this project's engine drafts, with the others a compiled graph of
NxDI (NeuronX Distributed Inference).

With vLLM as the engine there are fused, eagle, eagle3 and mtp; only vLLM has mtp.
"""

DEFAULT_BRANCHES = 3
DEFAULT_GAMMA = 8
"""Default number of draft tokens: per round in synchronous drafting, at most per pass if the draft runs ahead, and
always per pass of a compiled graph that has both models."""
FUSED_GAMMA = 16
"""Most draft tokens per pass where draft and target take turns in one process; only as many are drafted as pay."""
DEFAULT_WORKER_SLOTS = 256
"""Default of the most sessions that one draft worker of the pool gets, even if it offers more slots."""
MIN_VOCABULARY_SHARE = 0.5
"""Least share of the target's token ids that a draft model with another tokenizer must have."""
DEFAULT_IDLE_TIMEOUT_S = 60.0
DEFAULT_START_TIMEOUT_S = 4 * 3600.0
"""Limit of a server's start in seconds, while it makes progress; it may compile a model first."""
DEFAULT_PROMPT_SHARE = 2.0
"""Most time that reading prompts adds to a pass, as a multiple of the pass. At 2.0, other requests wait three times as
long for a token, and a prompt takes 1.5 times as long as without other requests."""
ALWAYS, MEASURED, NEVER = "always", "measured", "never"
"""Values of `ServerConfig.drafting`; with MEASURED, drafting is on while it is not slower than passes without."""
DEFAULT_PORT = 50051
DEFAULT_SERVE_PORT = 50052
"""Port of a draft worker that serves clients."""
MAX_PASS_MS = 10_000.0
"""Longest time of an emulated pass, in milliseconds."""

BATCH = Range(1, 4096)
"""Range of the number of sequences in flight at once."""
BRANCHES = Range(0, 16)
"""Range of the number of branches (alternative drafts) of a sequence; each takes a further slot of the draft model."""
PORT = Range(0, 65535)
"""Range of ports to listen on; 0 takes a free one."""
SECONDS = Range(0.0, above=True)
COUNT = Range(0)
NEURON = "AWS Neuron devices (backend neuron)"
SERVICE_FLAGS = ("metrics_port", "otlp_endpoint")
"""Fields of `ObserveConfig` that are flags of servers only, not of clients."""

_DNS, _FILE = "dns:///", "file:///"
_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[^A-Z/?#@\s,*]+")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class PassTime:
    """Parts of the time of an emulated pass, by the roofline model (Williams, Waterman, Patterson, 2009).

    A device reads the weights while it computes, so only the longer of these two times counts; then it reads keys and
    values.

    Attributes:
        base_s: time to read the weights; 0 for a pass that is not emulated.
        session_s: time to read the keys and values of one session.
        token_s: time to compute one token.
    """

    base_s: float = 0.0
    session_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_sessions: int, num_tokens: int) -> float:
        """Return the seconds of a pass over `num_sessions` sessions with `num_tokens` tokens together."""
        return max(self.base_s, num_tokens * self.token_s) + num_sessions * self.session_s

    def __str__(self) -> str:
        """Return the text that `Emulation.parse` reads after a model's name."""
        further = ((self.session_s, "session"), (self.token_s, "token"))
        parts = [f"{seconds * 1e3:g}ms/{per}" for seconds, per in further if seconds]
        return "+".join([f"{self.base_s * 1e3:g}ms", *parts])


NO_TIME = PassTime()
_MS = r"(\d+(?:\.\d+)?)ms"
_PASS_TIME = re.compile(rf"(target|draft):{_MS}(?:\+{_MS}/session)?(?:\+{_MS}/token)?")


@dataclass(frozen=True, slots=True)
class Emulation:
    """Emulation of slower devices: each pass of target or draft sleeps until it has taken the time set for it here."""

    target: PassTime = NO_TIME
    draft: PassTime = NO_TIME

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the emulation that a text describes: `target:25ms,draft:3ms`, or one of the two.

        Each time may grow by `+1ms/session`, `+0.1ms/token`, or both in this order.

        Raises:
            ConfigError: the text has another form, or a time is longer than MAX_PASS_MS.
        """
        parts = [_PASS_TIME.fullmatch(part.strip()) for part in text.split(",")]
        given = {part[1]: [float(each or 0) for each in part.groups()[1:]] for part in parts if part}
        form = "say target:25ms,draft:3ms, or one of the two, each with +1ms/session and +0.1ms/token if it grows"
        _require(len(given) == len(parts), f"{text}: {form}")
        for name, milliseconds in given.items():
            _require(max(milliseconds) <= MAX_PASS_MS, f"{name}:{max(milliseconds):g}ms is above {MAX_PASS_MS:g}ms")
        return cls(**{name: PassTime(*(each / 1e3 for each in times)) for name, times in given.items()})

    def __str__(self) -> str:
        """Return a text from which `parse` makes an equal emulation."""
        given = (("target", self.target), ("draft", self.draft))
        return ",".join(f"{name}:{time}" for name, time in given if time != NO_TIME)


NOT_EMULATED = Emulation()


@dataclass(frozen=True, slots=True)
class NeuronOptions(Checked):
    """Settings of models compiled for AWS Neuron devices.

    Attributes:
        tp_degree: logical NeuronCores that a model is sharded over.
        gamma: draft tokens that a compiled verification pass has room for; 0 compiles none, as for a draft.
        method: one of SPECULATION_METHODS.
        overrides: further parameters of NxDI's NeuronConfig, as a JSON object, with underscores or dashes in names;
            objects of several flags are merged.
        artifacts: folder of compiled models (default: $NEURON_COMPILED_ARTIFACTS, or one in the user's cache).
        cores: NeuronCores of this process, such as 0-3,8 (default: $NEURON_RT_VISIBLE_CORES, or all).
        device_sampling: let the device choose tokens where the host could (fused, or a target alone): less traffic,
            but fused is then greedy, and a target alone takes no seeds.
    """

    SECTION: ClassVar = NEURON

    tp_degree: int = setting(1, "--tp_degree N", within=Range(1))
    gamma: int = setting(0, within=GAMMA)
    method: str = setting("vanilla", "--speculation_method", choices=SPECULATION_METHODS)
    overrides: Mapping[str, Any] = setting({}, "--neuron_config JSON")
    artifacts: Path | None = setting(None, "--compiled_model_path DIR")
    cores: str | None = setting(None, "--neuron_cores LIST")
    device_sampling: bool = setting(False, "--device_sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Checked):
    """Arithmetic, room and threads that a process gives to each model it loads.

    Attributes:
        backend: inference engine: torch, onnx, neuron, ...; auto takes the fastest exact one.
        device: auto, cpu, cuda, cuda:N, neuron (%(default)s: CUDA where there is one; neuron: experimental, by backend
            torch on TorchNeuron).
        dtype: arithmetic (%(default)s: float32 on CPU, bfloat16 elsewhere; int8: linear layers, backend onnx).
        exact: keep text the same to the bit, whatever drafts, other requests and kept prefixes there are
            (docs/speculation.md). auto: by backend torch in bfloat16 and float16, on a device only up to 16 slots;
            always: with more slots, in float32, and on NxDI too; never: nowhere.
        sequence_length: limit of prompt and output together (default: the model's limit, at most 2048).
        beyond_positions: allow a --sequence_length above the positions that the model was trained for; its text may
            become worse there.
        num_slots: sequences in flight at once.
        num_threads: CPU threads of a pass (default: the cores this process may use, less one on a target that
            shares the machine with its draft, that is, listens on loopback; a draft takes one).
        prefix_caching: reuse the prefix that a request shares with an earlier one, if a slot still holds it.
        compile_policy: auto: backend neuron compiles a model that is not compiled yet, backend torch captures CUDA
            graphs where there is CUDA; never: neuron refuses such a model, torch runs operator by operator; always:
            torch compiles on any device; only: like always, and the process ends.
    """

    backend: str = setting("auto", "--backend")
    device: str = setting("auto", "--device")
    dtype: str = setting("auto", "--dtype", choices=("auto", *DTYPES))
    exact: str = setting("auto", "--exact", choices=("auto", "always", "never"))
    sequence_length: int | None = setting(None, "--sequence_length TOKENS", within=Range(2))
    beyond_positions: bool = setting(False, "--beyond_positions")
    num_slots: int = setting(8, "--batch N", within=BATCH)
    num_threads: int = setting(0, "--threads N", within=COUNT)
    prefix_caching: bool = setting(True, "--prefix_caching")
    compile_policy: str = setting(COMPILE_POLICIES[0], "--compile", choices=COMPILE_POLICIES)
    neuron: NeuronOptions = group(NeuronOptions)


@dataclass(frozen=True, slots=True)
class ModelConfig(Loading):
    """Model to load, and its settings.

    Attributes:
        path: Hugging Face directory (config.json, *.safetensors, tokenizer.json).
        backend: name in `specdec.inference.backends.registry`; without a command line, the reference backend.
        pass_time: shortest time of a pass; see `Emulation`.
    """

    path: Path
    backend: str = field(default="torch", kw_only=True)
    pass_time: PassTime = NO_TIME

    @property
    def name(self) -> str:
        """Return the name of the model for clients."""
        return model_name(self.path)

    def __post_init__(self) -> None:
        limit, asked = CheckpointFiles(self.path).num_positions, self.sequence_length or 0
        check(self)
        fault = f"sequence_length {asked} is above the {limit} positions of model {self.path}"
        _require(self.beyond_positions or asked <= limit, f"{fault}: --beyond_positions goes beyond them")
        emulable = self.pass_time == NO_TIME or "neuron" not in self.backend
        _require(emulable, f"backend {self.backend} has a device: --emulate is for those that compute on the host")


@dataclass(frozen=True, slots=True)
class ProposerConfig:
    """Source of draft tokens: a model, or the sequence itself (prompt lookup).

    Attributes:
        tokenizer_path: directory of the target's tokenizer, and for lookup of the config.json with its vocabulary.
        model: draft model, which may have another tokenizer; None looks drafts up in the sequence.
        num_slots: sequences drafted at once.
        branches: most branches of each sequence; the model gets further slots for them.
        min_vocabulary_share: least share of the target's tokens that a draft with another tokenizer must have.
    """

    tokenizer_path: Path
    model: ModelConfig | None
    num_slots: int = setting(REQUIRED, "--batch", within=BATCH)
    branches: int = setting(0, within=BRANCHES)
    min_vocabulary_share: float = setting(MIN_VOCABULARY_SHARE, "--min_vocabulary_share SHARE", within=Range(0.0, 1.0))

    def __post_init__(self) -> None:
        CheckpointFiles(self.tokenizer_path).require_model()
        check(self)

    @property
    def model_with_branches(self) -> ModelConfig | None:
        """Return the draft model's configuration with further slots for branches; None for prompt lookup.

        It is not made exact to the bit, since drafts change no token.
        """
        return self.model and replace(self.model, num_slots=self.num_slots * (1 + self.branches), exact="never")


@dataclass(frozen=True, slots=True)
class DialSecurity:
    """Security of a client's connections; files are PEM, and read again when they change.

    Attributes:
        ca: dial with TLS; the server's certificate must come from one of these CAs (PEM).
        cert: client certificate to present (PEM).
        key: key of the client certificate (PEM).
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
        """Raise ConfigError if a server would be dialled in plain text where others could read along.

        That is so without a `ca`, if the server is not on this machine's loopback; `insecure` allows it.

        Args:
            target: address of the server, HOST:PORT or dns:///NAME:PORT; or file:///PATH, a list of addresses, which
                counts as not on loopback.
        """
        host = target if target.startswith(_FILE) else target.removeprefix(_DNS).rpartition(":")[0]
        is_safe = self.ca is not None or self.insecure or is_loopback(host)
        what = "prompts and answers" if self.token_file is None else "the token, prompts and answers"
        ways = "--tls_ca encrypts them; --insecure sends them all the same"
        _require(is_safe, f"{what} would go to {host} in plain text: {ways}")


PLAIN = DialSecurity()


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Servers that a client dials (replicas of one model), its timeouts and its security.

    Attributes:
        host: host of the server, or several replicas: HOST[:PORT],..., dns:///NAME[:PORT] or a list in file:///PATH.
        port: port of hosts that name none.
        connect_timeout_s: longest wait for the server at start.
        deadline_s: longest time of a request.
        reconnect_timeout_s: longest time that a request without a server waits to resume, at the lost one or another.
    """

    SECTION: ClassVar = "connection"

    host: str = setting("127.0.0.1", "--target_host HOST")
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
        """Return the address of each server: HOST:PORT, dns:///NAME:PORT or file:///PATH."""
        return targets(self.host, self.port)


@dataclass(frozen=True, slots=True)
class DraftConfig(Checked):
    """Settings of a draft worker.

    Attributes:
        connection: connection to the target.
        gamma: draft tokens per round, 0 for none.
        schedule: async: draft ahead while the target verifies or decodes; sync: draft, send, wait for the verdict;
            load: sync while so many requests share the target's passes that these are slow, else async.
        max_waiting: requests that may queue for a slot of the draft model.
        num_threads: threads of the draft model; 0: not known.
    """

    connection: ConnectionConfig = group(ConnectionConfig)
    gamma: int = setting(DEFAULT_GAMMA, "--gamma --speculation_length N", section="speculation", within=GAMMA)
    schedule: Schedule = setting(Schedule.LOAD, "--schedule", section="link to the target")
    max_waiting: int = setting(64, within=COUNT)
    num_threads: int = setting(0, within=COUNT)


@dataclass(frozen=True, slots=True)
class FusedConfig(Checked):
    """Settings of a process that runs target and draft model together.

    Attributes:
        gamma: most draft tokens of one session in one pass.
        adaptive_gamma: draft only as many of gamma tokens as pay, by the draft's confidence and the measured times;
            a compiled graph always drafts gamma.
    """

    target: ModelConfig
    draft: ProposerConfig
    gamma: int = setting(
        FUSED_GAMMA,
        "--gamma --speculation_length N",
        help="draft tokens per pass at most, as many as pay; 0 for none "
        f"(default: {FUSED_GAMMA}; where draft and target are one compiled graph, always {DEFAULT_GAMMA})",
        section="speculation",
        within=GAMMA,
    )
    adaptive_gamma: bool = setting(True, "--adaptive_gamma", section="speculation length")


@dataclass(frozen=True, slots=True)
class PortSecurity:
    """Security of a server's ports; files are read again when they change.

    Attributes:
        cert: the server's certificate, with its chain (PEM).
        key: key of the server's certificate (PEM).
        client_ca: CAs of clients' certificates (PEM), for --mtls_port.
        mtls_port: further gRPC port, for clients with a certificate (default: none).
        auth_file: callers and their rights (TOML); all other callers are refused (default: every caller has all
            rights).
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
    """Addresses, limits and shutdown of a server.

    Attributes:
        host: address to listen on (%(default)s; 0.0.0.0 for all).
        port: port to listen on with gRPC, 0 for a free one; None: no gRPC.
        max_waiting: requests queued for a slot.
        idle_timeout_s: in schedule sync, decode without a draft worker silent for this long; in load, for 1 s at most.
        grace_s: on SIGTERM, seconds that running requests get to end.
        defaults: values for parameters that a request leaves open; a draft worker or gateway uses the target's.
        drain_delay_s: before the grace period, time in which balancers see that this server is not ready; it still
            serves.
        stall_timeout_s: drop a client that has read nothing for this long.
        pass_timeout_s: report not ready and not alive while a pass of the model takes longer than this.
        drain: on SIGTERM, move: after a second, requests of callers that have another server continue there with the
            same tokens; wait: they get the grace period like all others.
        max_worker_slots: most sessions of one worker of the pool, even if it announces more room.
        lookup: propose the tokens that followed an earlier occurrence of a request's last tokens, as many as pay.
        replay: keep answers in this many MiB of memory, and draft from them for later requests of the same account
            and cache salt (0: keep none).
        drafting: measured: draft only while that is not slower than passes without drafts; or always; or never.
        prompt_share: time for reading prompts in a pass that also answers requests, as a multiple of this pass without
            them; more shortens the time to first token of long prompts, and lengthens the others' gaps.
        probe_port: answer /livez and /readyz over plain HTTP on this port, to every caller (default: none).
        ready_json: when all ports are open, write one line of JSON to stdout, with the actual port for each 0.
        lifeline: also drain, as on SIGTERM, when stdin ends, that is, when the process at its other end is gone.
        security: security of all ports except `probe_port`.
    """

    SECTION: ClassVar = "server"

    host: str = setting("127.0.0.1", "--host")
    port: int | None = setting(DEFAULT_PORT, "--port PORT", within=PORT)
    max_waiting: int = setting(64, "--max_waiting N", within=COUNT)
    idle_timeout_s: float = setting(
        DEFAULT_IDLE_TIMEOUT_S, "--idle_timeout_s S", section="sessions of draft workers", within=SECONDS
    )
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
    replay: float = setting(0.0, "--replay SIZE", within=Range(0.0, FINITE))
    drafting: str = setting(
        MEASURED, "--drafting", choices=(ALWAYS, MEASURED, NEVER), section="never slower than plain"
    )
    prompt_share: float = setting(
        DEFAULT_PROMPT_SHARE, "--prompt_share PASSES", section="long prompts", within=Range(0.1, 1000.0)
    )
    probe_port: int | None = setting(None, "--probe_port PORT", within=PORT)
    ready_json: bool = setting(False, "--ready_json")
    lifeline: str | None = setting(None, "--lifeline", choices=("stdin",))
    security: PortSecurity = group(PortSecurity)

    def __post_init__(self) -> None:
        check(self)
        is_safe = self.on_loopback or self.security.cert is not None or self.security.insecure
        ways = "--tls_cert and --tls_key (or --tls_self_signed DIR) encrypt, --insecure serves all the same"
        has_port = self.port is not None or self.security.mtls_port is None
        _require(has_port, "--mtls_port is a second gRPC port: --serve opens the first")
        _require(is_safe, f"host {self.host} is not loopback, and others could read along in plain text: {ways}")

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def ends_by_call(self) -> bool:
        """Return whether gRPC calls may end the server: only this machine sends them, or an auth file grants it."""
        return self.on_loopback or self.security.auth_file is not None


OF_MODELS = ("lookup", "replay", "drafting", "prompt_share", "idle_timeout_s", "max_worker_slots", "pass_timeout_s")
"""Fields of `ServerConfig` that are flags only of processes with a target."""


def optional_grpc_port(what: str) -> Any:
    """Return a declaration of `ServerConfig.port` as flag --serve, for processes that need no gRPC port.

    Args:
        what: what the port is for, as the beginning of the flag's help.
    """
    text = f"{what} on this port, on {DEFAULT_SERVE_PORT} if none is named (default: no gRPC)"
    return same(ServerConfig, "port", usage="--serve PORT", default=None, bare=DEFAULT_SERVE_PORT, help=text)


@dataclass(frozen=True, slots=True)
class HttpConfig(Checked):
    """Settings of OpenAI's API over HTTP.

    Attributes:
        port: port of the HTTP server.
        stream_chunk: content of a stream's event: one token, or all tokens of a target pass.
        served_model_name: name of the model (default: its directory's).
        max_body_mib: largest request body in MiB.
        sse_ping_s: send an empty chunk on a stream that is silent for this long, for proxies that would end it; 0:
            never.
        no_page: serve no page at /.
        tool_call_parser: format of the model's tool calls; auto: taken from its chat template.
        reasoning_parser: split <think>...</think> off as reasoning_content; auto: if the chat template has it.
        deadline_s: longest time of a request in seconds.
        allowed_origins: web pages of other origins that browsers let use this server, such as
            https://chat.example.com, comma-separated; *: all (default: none).
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
    allowed_origins: str = setting("", "--allowed_origins ORIGINS")

    def __post_init__(self) -> None:
        check(self)
        for origin in self.origins:
            fault = f"allowed_origins: {origin!r} is not valid as an origin, which a browser sends as"
            how = "SCHEME://HOST or SCHEME://HOST:PORT, in lower case, without a path or the scheme's usual port"
            _require(origin == "*" or bool(_ORIGIN.fullmatch(origin)), f"{fault} {how}; * allows all")

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the origins in `allowed_origins`, which has commas between them."""
        return tuple(filter(None, map(str.strip, self.allowed_origins.split(","))))


OPTIONAL_HTTP_PORT = same(HttpConfig, "port", default=None, help="port of the HTTP server; without it there is none")
"""Declaration of `HttpConfig.port` for servers that serve HTTP only if the flag is given."""


@dataclass(frozen=True, slots=True)
class ObserveConfig(Checked):
    """Reports of a process on its work, each optional.

    Attributes:
        role: role of the process, which names its files and spans.
        metrics_port: serve Prometheus metrics at /metrics of this port, on the server's host (default: none).
        otlp_endpoint: send OpenTelemetry traces of requests to this collector, such as http://localhost:4317
            (default: none).
        timeline: at the end, write a time-line of the model's steps in Chrome's trace format.
        profile: at the end, write performance_<role>_<time>.csv and .json into the current directory.
        log_level: lowest level of the messages on stderr.
    """

    role: str
    metrics_port: int | None = setting(None, "--metrics_port PORT", section="metrics", within=PORT)
    otlp_endpoint: str | None = setting(None, "--otlp_endpoint URL", section="traces")
    timeline: Path | None = setting(None, "--trace FILE", section="time-line")
    profile: bool = setting(False, "--profile", section="reports")
    log_level: str = setting("info", "--log_level", choices=("debug", "info", "warning", "error"), section="reports")


def targets(text: str, port: int | None = None) -> tuple[str, ...]:
    """Return the addresses in a text with commas between them, each once: HOST:PORT, dns:///NAME:PORT or file:///PATH.

    Args:
        port: port of addresses without one; None: every address needs its own.

    Raises:
        ConfigError: an address has none of these forms; the message names it.
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
    """Return whether a host is one that only this machine can reach: localhost, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def model_name(path: Path) -> str:
    """Return the name for clients of a model in a directory: the directory's name.

    In the hub's cache, where a path ends with models--NAMESPACE--NAME/snapshots/REVISION, it is NAMESPACE/NAME.
    """
    *_, repository, snapshots, _ = ("", "", *path.parts)
    if snapshots == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def usable_core_ids() -> list[int]:
    """Return the numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(usable_core_ids())
