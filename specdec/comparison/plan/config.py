"""Configuration of a comparison: immutable, and checked when it is made. Starts no process and reads no clock."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from specdec.comparison.plan.backend import SHARED_TARGET, BackendConfig, ServerPlan
from specdec.comparison.plan.datasets import Prompt
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.plan.lists import list_of
from specdec.comparison.plan.machine import Machine, split_into_machines
from specdec.comparison.plan.slo import FIGURES, Slo
from specdec.inference.config import ALWAYS, BRANCHES, DEFAULT_BRANCHES, NOT_EMULATED, SECONDS, model_name
from specdec.inference.errors import ConfigError
from specdec.inference.request import MAX_GAMMA, RANGES, Grammar, Schedule
from specdec.inference.serving.models import NGRAM, VLLM
from specdec.inference.settings import Range, check, setting

LOOKUP = "lookup"
"""Value of `Contender.draft` if the target itself proposes tokens: found in the sequence or forced by a grammar."""
DELAY_MS = Range(0.0, 10_000.0)
ARRIVALS = "arrivals at a rate (an open loop), warm-up and goodput"
Load: TypeAlias = tuple[int, float | None]
"""Load as (requests in flight, None) if clients wait for answers, or as (0, requests per second) in an open loop."""
MAX_POOL = 64
"""Maximum number of draft workers in the pool that drafts for one target (topology pool)."""
OPEN_LOOP_BATCH = 8
"""Number of requests that a server processes at once in an open loop, equal to main.py's default."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class Topology(enum.Enum):
    """Placement of draft and target, on one machine or on two.

    Attributes:
        TARGET: the target's server alone, without a draft model.
        FUSED: one server with both models.
        DISTRIBUTED: a draft worker on a second machine, called the edge. The worker answers clients, and asks the
            target to verify.
        POOL: a target that answers clients, with draft workers on a second machine.
        ENDPOINT: a server that runs already; where its models are is unknown.
    """

    TARGET = "target"
    FUSED = "fused"
    DISTRIBUTED = "distributed"
    POOL = "pool"
    ENDPOINT = "endpoint"

    @property
    def is_split(self) -> bool:
        """Return whether draft and target are on different machines."""
        return self in (Topology.DISTRIBUTED, Topology.POOL)

    @property
    def serves_at_edge(self) -> bool:
        """Return whether clients send requests to the draft, at the edge, and not to the target."""
        return self is Topology.DISTRIBUTED


STARTED = tuple(topology for topology in Topology if topology is not Topology.ENDPOINT)
"""Topologies for which the comparison starts servers."""


class ClientSite(enum.Enum):
    """Site of the client that measures: beside the draft worker (edge) or the target. It decides which links delay."""

    EDGE = "edge"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one kind, which a report shows apart from the other kinds.

    Attributes:
        kind: name of the file without its ending, such as "structured".
        prompts: at least one prompt.
    """

    kind: str
    prompts: tuple[Prompt, ...]

    def __post_init__(self) -> None:
        _require(len(self.prompts) > 0, f"prompt kind {self.kind} has no prompt")


def mixed(prompt_sets: Sequence[PromptSet]) -> PromptSet:
    """Return one set with the prompts of all sets, in which the kinds take turns; its kind names all of theirs."""
    turns = itertools.zip_longest(*(prompt_set.prompts for prompt_set in prompt_sets))
    prompts = tuple(prompt for turn in turns for prompt in turn if prompt is not None)
    return PromptSet(" and ".join(prompt_set.kind for prompt_set in prompt_sets), prompts)


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The network between edge and target.

    Attributes:
        jitter_ms: maximum of a further random delay, in milliseconds per direction.
        bandwidth_mbps: megabits per second and direction (default: unlimited).
        client_site: place of the thin client: beside the draft worker (edge) or beside the target.
    """

    SECTION: ClassVar = "network between edge and target (a proxy on loopback)"

    rtts_ms: tuple[float, ...] = setting(
        (0.0, 10.0, 50.0),
        "--rtt_ms LIST",
        help="round trip times in milliseconds, half of each per direction; default (0,10,50), or 0 with --endpoint",
        kind=list_of(float),
        within=DELAY_MS,
    )
    jitter_ms: float = setting(0.0, "--jitter_ms MS", within=DELAY_MS)
    bandwidth_mbps: float | None = setting(None, "--bandwidth_mbps MBPS", within=Range(0.0, above=True))
    client_site: ClientSite = setting(ClientSite.EDGE, "--client_site")

    def __post_init__(self) -> None:
        check(self)
        _require_distinct("rtt_ms", self.rtts_ms)

    def is_crossed(self, *, at_edge: bool) -> bool:
        """Return whether the network between edge and target lies between the client and a server.

        Args:
            at_edge: whether the server is at the edge, where draft workers are, and not at the target's site.
        """
        return at_edge is not (self.client_site is ClientSite.EDGE)


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Requests that every topology gets.

    Attributes:
        prompt_sets: one set per prompt kind.
        num_runs: runs of every measurement; topologies take turns within a run.
        max_new_tokens: output tokens per request.
        ignore_eos: let every answer have exactly --max_new_tokens tokens.
        temperature: sampling temperature; 0 is greedy.
        near_tie: difference in log-probability up to which answers may part by rounding; 0.25 for bfloat16, 0 for none;
            needs --temperature 0.
        seed: key of the sampling noise, 0 .. 2^64-1.
        concurrencies: requests in flight; above 1 needs Locust (requirements/loadtest.txt), except with --endpoint and
            --cell_s.
        cell_s: seconds of each run of a closed loop, after half as long without measuring; 0: until all prompts are
            answered.
        deadline_s: longest time that a request may take.
        request_rates: rates of an open loop, in requests per second at random times, measured beside --concurrency.
        num_arrivals: requests per run and rate of an open loop.
        warm_up: prompts of each kind that each topology answers before the measurement.
        slo: limits that a request must meet to count as goodput.
        grammar: grammar of all answers, if any; tokens that it forces are the target's own drafts.
    """

    SECTION: ClassVar = "workload"

    prompt_sets: tuple[PromptSet, ...] = ()
    num_runs: int = setting(3, "--num_runs N", within=Range(1))
    max_new_tokens: int = setting(96, "--max_new_tokens N")
    ignore_eos: bool = setting(False, "--ignore_eos")
    temperature: float = setting(0.0, "--temperature T", within=RANGES["temperature"])
    near_tie: float = setting(0.0, "--near_tie NATS", within=Range(0.0, 10.0))
    seed: int = setting(0, "--seed N", within=RANGES["seed"])
    concurrencies: tuple[int, ...] = setting((1,), "--concurrency LIST", kind=list_of(int), within=Range(1, 4096))
    cell_s: float = setting(0.0, "--cell_s S", within=Range(0.0, 3600.0))
    deadline_s: float = setting(120.0, "--deadline_s S", within=SECONDS)
    request_rates: tuple[float, ...] = setting(
        (), "--request_rate LIST", kind=list_of(float), section=ARRIVALS, within=Range(0.0, 10_000.0, above=True)
    )
    num_arrivals: int = setting(32, "--num_arrivals N", section=ARRIVALS, within=Range(1, 100_000))
    warm_up: int = setting(1, "--warm_up N", section=ARRIVALS)
    slo: Slo = field(default_factory=Slo)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check(self)
        _require(self.max_new_tokens >= 2, f"max_new_tokens {self.max_new_tokens} is below 2: there is no rate in one")
        _require_distinct("concurrency", self.concurrencies)
        _require_distinct("request_rate", self.request_rates or ("none",))
        _require(
            not self.near_tie or self.temperature == 0,
            f"near_tie {self.near_tie:g}: at temperature {self.temperature:g} tokens part by noise too; use 0",
        )
        _require(self.warm_up >= 1, f"warm_up {self.warm_up} is below 1: first requests are slower than all others")

    @property
    def max_concurrency(self) -> int:
        """Number of slots that each server needs for the most requests in flight."""
        return max(*self.concurrencies, OPEN_LOOP_BATCH if self.request_rates else 1)

    @property
    def loads(self) -> tuple[Load, ...]:
        closed = tuple((concurrency, None) for concurrency in self.concurrencies)
        return (*closed, *((0, rate) for rate in sorted(self.request_rates)))


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve: a topology, and how it drafts.

    Attributes:
        draft: a model's directory, "ngram", or "lookup" for a target that drafts by itself; None for a target without
            a draft and for endpoints.
        gamma: draft tokens per round; None where draft is None.
        schedule: whether the draft waits for the target (sync), keeps drafting (async), or does either by load; None
            for topologies other than distributed.
        branches: maximum number of branches, which are alternatives to the draft's best sequence of tokens; None if
            the draft does not keep drafting while the target verifies.
        endpoint: name of a server that runs already and chooses its drafting itself; None for other topologies.
        workers: number of draft workers in the pool; 1 in other topologies.
    """

    topology: Topology
    draft: str | None = None
    gamma: int | None = None
    schedule: Schedule | None = None
    branches: int | None = None
    endpoint: str | None = None
    workers: int = 1

    @property
    def draft_name(self) -> str:
        """Short name of the draft, "-" for none."""
        return "-" if self.draft is None else model_name(Path(self.draft))

    @property
    def label(self) -> str:
        """Name for messages: topology, with schedule or number of workers, then draft, gamma and number of branches."""
        if self.draft is None:
            return self.name
        branches = "" if self.branches is None else f", {self.branches} branches"
        return f"{self.name} (draft {self.draft_name}, gamma {self.gamma}{branches})"

    @property
    def name(self) -> str:
        """Readable name: the endpoint's, or else the topology with its schedule or number of workers."""
        if self.endpoint is not None:
            return self.endpoint
        if self.workers > 1:
            return f"{self.topology.value} of {self.workers}"
        return f"{self.topology.value} {self.schedule.value}" if self.schedule else self.topology.value

    def as_json(self) -> dict[str, Any]:
        """Return all fields as values for JSON; see `of_json`."""
        schedule = self.schedule and self.schedule.value
        return {**asdict(self), "topology": self.topology.value, "schedule": schedule}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Contender:
        """Return the contender that `as_json` wrote as these values."""
        schedule = values["schedule"] and Schedule(values["schedule"])
        return cls(**{**values, "topology": Topology(values["topology"]), "schedule": schedule})

    @property
    def series(self) -> Contender:
        """Topology, schedule and endpoint of this contender, without its draft, gamma, branches and workers.

        Charts have one line for all contenders with an equal series.
        """
        return Contender(self.topology, schedule=self.schedule, endpoint=self.endpoint)

    @property
    def runs_ahead(self) -> bool:
        """Return whether the draft keeps drafting while the target verifies, and does not wait for the result."""
        return self.topology is Topology.POOL or (self.schedule is not None and self.schedule.runs_ahead)


ALONE = Contender(Topology.TARGET)
"""Way to serve by the target alone, without a draft."""


@dataclass(frozen=True, slots=True)
class ComparisonConfig:
    """Configuration of a whole comparison; see `ComparisonSettings` for the fields that both have.

    Attributes:
        usable_cores: CPU cores of this host that may be used.
        chosen: contenders (ways to serve) to measure; if empty, all that the other fields describe.
        endpoints: servers that are already running.
        drafting: when started servers draft: always, never, or while it pays.
        budget_s: seconds of wall time of a search, starts of servers included.
        asked: all flags of the command in the format of a --config file.
    """

    target_model: Path
    draft_models: tuple[str, ...]
    topologies: tuple[Topology, ...]
    gammas: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    network: NetworkConfig
    workload: WorkloadConfig
    usable_cores: tuple[int, ...]
    cores_per_machine: int
    output: Path
    branches: tuple[int, ...] = (DEFAULT_BRANCHES,)
    backend: BackendConfig = field(default_factory=BackendConfig)
    chosen: tuple[Contender, ...] = ()
    llmperf: bool = False
    endpoints: tuple[Endpoint, ...] = ()
    equal_weights: bool = False
    one_at_a_time: bool = False
    workers: tuple[int, ...] = (1,)
    drafting: str = ALWAYS
    capacity: int | None = None
    budget_s: float = 600.0
    page: str | None = None
    asked: str = ""

    def __post_init__(self) -> None:
        _require_distinct("prompt kind", [prompt_set.kind for prompt_set in self.workload.prompt_sets])
        _require_distinct("topology", [topology.value for topology in self.topologies] or self.endpoints)
        started = {contender.name for contender in self._started}
        _require_distinct("name", [*started, *(endpoint.name for endpoint in self.endpoints)])
        for rtt_ms in self.network.rtts_ms:
            where = "the network to an endpoint is what it is; without --endpoint, others can be tried"
            _require(not self.endpoints or rtt_ms == 0, f"rtt_ms {rtt_ms:g}: {where}")
        if self.topologies:
            self._require_models()
        elif (emulation := self.backend.emulation) != NOT_EMULATED:
            raise ConfigError(f"emulate {emulation}: passes of endpoints are their own; name --topologies to start")
        _require_distinct("gamma", self.gammas)
        _require_distinct("branches", self.branches)
        for branches in self.branches:
            _require(branches in BRANCHES, f"branches {branches} {BRANCHES.fault(branches)}")
        _require_distinct("schedule", [schedule.value for schedule in self.schedules])
        for gamma in self.gammas:
            _require(1 <= gamma <= MAX_GAMMA, f"gamma {gamma} is outside 1..{MAX_GAMMA}; 0 is the target alone")
        _require_distinct("workers", self.workers)
        for workers in self.workers:
            _require(1 <= workers <= MAX_POOL, f"workers {workers} is outside 1..{MAX_POOL}")
        _require(len(self.workers) == 1 or self.capacity is not None, "workers: several numbers need --capacity")
        if self.capacity is not None:
            self._require_what_capacity_needs()
        self._require_what_vllm_can()
        self._require_what_a_graph_can()
        self.parts  # noqa: B018 - raises if the host has too few cores

    def _require_models(self) -> None:
        if self.topologies != (Topology.TARGET,):
            _require_distinct("draft model", [model_name(Path(draft)) for draft in self.draft_models])
        _require(_has_model(self.target_model), f"target model {self.target_model}: no config.json there")
        for draft in self.draft_models:
            _require(draft == NGRAM or _has_model(Path(draft)), f"draft model {draft}: no config.json there")

    def _require_what_capacity_needs(self) -> None:
        """Raise ConfigError if a search for the most streams is asked for, but other settings make it impossible.

        The search needs a limit of --slo for the time between tokens, and the target alone to compare with. It can use
        neither endpoints nor request rates.
        """
        slo = "slo: --capacity needs the promised time between tokens, such as itl:50ms for 20 tokens/s per stream"
        _require(self.itl_s > 0, slo)
        _require(Topology.TARGET in self.topologies, "capacity: it compares with the target alone; name target")
        _require(not self.endpoints, "capacity: an endpoint's drafting is unknown; it is for --topologies")
        _require(not self.workload.request_rates, "request_rate: --capacity keeps streams in flight")

    def _require_what_vllm_can(self) -> None:
        """Raise ConfigError if vLLM's own speculator (topology fused) is to use prompt lookup, not a draft model."""
        is_fused = Topology.FUSED in self.topologies and self.backend.engine == VLLM
        is_right = not is_fused or NGRAM not in self.draft_models
        _require(is_right, f"engine {VLLM} has no draft {NGRAM} of its own: name --topologies target,distributed,pool")

    def _require_what_a_graph_can(self) -> None:
        """Raise ConfigError for topologies, gammas or temperatures that models compiled for a device cannot serve."""
        method = self.backend.method or "fused"
        _require(
            not self.backend.device_sampling or set(self.topologies) <= {Topology.TARGET, Topology.FUSED},
            "device_sampling is for topologies target and fused: a draft worker's tokens are verified on the host",
        )
        if Topology.FUSED in self.topologies and any(map(self.backend.one_graph, self.draft_models)):
            _require(
                self.one_at_a_time or len(self._graph_lengths) <= 1,
                f"gamma {', '.join(map(str, self.gammas))}: speculation_method {method} is compiled for one: "
                "name one, or use --one_at_a_time or --speculation_method vanilla",
            )
            _require(
                self.workload.temperature == 0 or self.backend.keeps_seeds,
                f"temperature {self.workload.temperature:g}: speculation_method {method} samples on the device, where "
                "seeds are not kept: use --temperature 0, or fused or vanilla without --device_sampling",
            )

    def _graph_length(self, contender: Contender) -> int | None:
        """Return the gamma for which a contender's server must be compiled; None if one server serves every gamma."""
        is_graph = contender.topology is Topology.FUSED and self.backend.one_graph(contender.draft or NGRAM)
        return contender.gamma if is_graph else None

    @property
    def _graph_lengths(self) -> set[int]:
        """All gammas for which the servers of this comparison must be compiled; empty if none needs it."""
        return {length for contender in self.contenders if (length := self._graph_length(contender)) is not None}

    def server_of(self, contender: Contender) -> ServerPlan:
        """Return the server to which clients send the requests of a contender, which is a way to serve."""
        draft, branches = contender.draft, contender.branches
        if contender.topology is Topology.TARGET:  # shared: lookup is set per request
            return SHARED_TARGET
        if contender.topology is Topology.FUSED:
            return ServerPlan("fused_target", draft)
        if contender.topology is Topology.POOL:
            return ServerPlan("target", draft, branches, pooled=True, workers=contender.workers)
        return ServerPlan("draft", draft, self.branches[0] if branches is None else branches)  # rounds: any server fits

    @property
    def servers(self) -> tuple[ServerPlan, ...]:
        """All server processes that this comparison starts, each once; a target that topologies share comes first."""
        found = []
        for contender in self._started:
            server = self.server_of(contender)
            found += [SHARED_TARGET] if contender.topology is Topology.DISTRIBUTED else []
            found.append(server)
            found += [replace(server, role="draft", number=i) for i in range(server.workers) if server.pooled]
        return tuple(sorted(dict.fromkeys(found), key=lambda server: server != SHARED_TARGET))

    @property
    def _started(self) -> list[Contender]:
        """Contenders (ways to serve) whose servers this comparison starts: all but endpoints."""
        return [contender for contender in self.contenders if contender.endpoint is None]

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Sets of CPU cores that stand for machines.

        The first is for servers with a target. The second, the edge, is for draft workers, if a topology has them on
        another machine. Empty if no server is started.

        Raises:
            ConfigError: the host has too few cores.
        """
        is_split = any(contender.topology.is_split for contender in self._started)
        names = [*(["target side"] if self._started else []), *(["edge"] if is_split else [])]
        return split_into_machines(names, self.usable_cores, cores_per_machine=self.cores_per_machine)

    @property
    def itl_s(self) -> float:
        """Limit of --slo for the time between tokens, in seconds; 0 without one."""
        return dict(self.workload.slo.limits).get(FIGURES["itl"], 0.0)

    @property
    def spare_cores(self) -> tuple[int, ...]:
        """Usable cores that belong to no machine."""
        taken = {core for machine in self.machines for core in machine.cores}
        return tuple(core for core in self.usable_cores if core not in taken)

    @property
    def parts(self) -> tuple[ComparisonConfig, ...]:
        """Comparisons to run one after another: with --one_at_a_time one for each set of servers, else only this."""
        if not self.one_at_a_time:
            self.machines  # noqa: B018 - raises if the host has too few cores
            return (self,)
        groups: dict[tuple[object, object, int | None], list[Contender]] = defaultdict(list)
        for contender in self.contenders:
            draft = None if contender.topology is Topology.TARGET else contender.draft
            groups[contender.topology, draft, self._graph_length(contender)].append(contender)
        return tuple(
            replace(self, one_at_a_time=False, chosen=tuple(group), gammas=self.gammas if length is None else (length,))
            for (_, _, length), group in groups.items()
        )

    @property
    def uses_locust(self) -> bool:
        """Return whether the load generator Locust, in its own process, sends the requests where several are in flight.

        Locust cannot send conversations, nor send to endpoints. It takes seconds to start, so this process also sends
        the requests of a search for capacities and of runs of a fixed time.
        """
        texts = (isinstance(it, str) for prompt_set in self.workload.prompt_sets for it in prompt_set.prompts)
        by_count = self.capacity is None and not self.workload.cell_s
        return by_count and max(self.workload.concurrencies) > 1 and not self.endpoints and all(texts)

    @property
    def trusts_weights(self) -> bool:
        """Return whether endpoints must give equal answers: if --equal_weights is set and requests are greedy."""
        return self.equal_weights and self.workload.temperature == 0

    @property
    def baseline(self) -> Contender:
        """Reference of speed-ups: the target alone, or the first endpoint if there are only endpoints."""
        return ALONE if self.topologies else self.contenders[0]

    @property
    def baseline_name(self) -> str:
        """Readable name of the baseline: that of the first endpoint, or "the target alone" if servers are started."""
        return self.baseline.endpoint or "the target alone"

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All ways to serve that are compared; the target alone comes first, if it takes part."""
        if self.chosen:
            return self.chosen
        alone = [ALONE] if Topology.TARGET in self.topologies else []
        alone += [replace(ALONE, draft=LOOKUP, gamma=max(self.gammas))] if self.capacity is not None else []
        ways: dict[Topology, list[tuple[Schedule | None, int | None]]] = {
            Topology.FUSED: [(None, None)],
            Topology.DISTRIBUTED: [
                (it, n) for it in self.schedules for n in (self.branches if it.runs_ahead else (None,))
            ],
            Topology.POOL: [(None, n) for n in self.branches],
        }
        started = [
            Contender(topology, draft, gamma, schedule, branches, workers=workers)
            for topology in self.topologies
            for schedule, branches in ways.get(topology, ())
            for draft, gamma in itertools.product(self.draft_models, self.gammas)
            for workers in (self.workers if topology is Topology.POOL else (1,))
        ]
        return (*alone, *started, *(Contender(Topology.ENDPOINT, endpoint=it.name) for it in self.endpoints))

    @property
    def series(self) -> tuple[Contender, ...]:
        """Each topology with its schedule, and each endpoint, that is compared; see `Contender.series`."""
        return tuple(dict.fromkeys(contender.series for contender in self.contenders))

    @property
    def sweeps(self) -> bool:
        """Return whether started topologies have several drafts, gammas or numbers of branches."""
        return bool(self.topologies) and len(self.draft_models) * len(self.gammas) * len(self.branches) > 1


def _has_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _require_distinct(name: str, values: Sequence[object]) -> None:
    _require(len(values) > 0, f"no {name} is given")
    value, count = Counter(values).most_common(1)[0]
    _require(count == 1, f"{name} {value} is given {count} times")
