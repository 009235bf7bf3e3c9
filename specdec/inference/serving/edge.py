"""Life cycle of an edge: a process in front of the servers of one model, with a draft worker or without.

Edges are gateways, draft workers that serve clients or complete prompts themselves, and clients without a model. All
of them dial their servers and notice when these serve another model. An edge with a draft also drafts, and turns tokens
into text. Edges differ in whether they have a draft, and in their ports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals

from specdec.grpc_comm.secured import Headers
from specdec.inference.config import (
    ConnectionConfig,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
)
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import ConfigError, HandshakeError, IncompatibleDraftError, RequestError, SpecDecError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.assembly import LoadedDraft, draft_engine, load_proposer, running
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import Host, opened
from specdec.inference.serving.observers import Observers, observed, timeline
from specdec.inference.serving.signals import stop_signal
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary
from specdec.inference.workers.calls.fleet import RETRY_S, Fleet, connected
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer, Operation
from specdec.inference.workers.completing.reading import Reader
from specdec.inference.workers.completing.remote import DISTRIBUTED, GATEWAY, card_of, card_of_target
from specdec.inference.workers.completing.writing import TextCompleter
from specdec.inference.workers.completion import Completer, ModelCard
from specdec.inference.workers.drafting.pool_worker import DraftWork
from specdec.inference.workers.drafting.private import PrivateWorker

logger = logging.getLogger(__name__)

REFUSALS = (RequestError, ConfigError, HandshakeError)
"""Errors of a server that last until the server is replaced, or configured in another way."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Settings of a draft worker for the requests of its own process: which draft it loads, and how it drafts."""

    proposer: ProposerConfig
    config: DraftConfig


@dataclass(frozen=True, slots=True)
class RunningDraft:
    """Running draft of a process that sends requests to servers.

    Attributes:
        loaded: the draft, which drafts in the target's token ids.
        path: directory of the tokenizer in whose token ids the draft drafts.
        engine: engine over the draft.
        worker: draft worker that drafts with this engine for the requests of the process.
    """

    loaded: LoadedDraft
    path: Path
    engine: DraftEngine
    worker: PrivateWorker

    async def follow(self, card: ModelCard) -> None:
        """Use the chat template and the request defaults of the model that `card` describes for requests from now on.

        Raises:
            ConfigError: the chat template is too long.
        """
        self.worker.reader = await _reader(self.loaded, self.path, card)


class Edge:
    """Process in front of the servers of one model: it sends them requests, and has the card that describes the model.

    Attributes:
        fleet: the servers.
        card: description of the model that the servers have now.
        draft: draft of this process; None if there is none.
        remote: sender of requests to the servers, which also asks them to tokenize texts; the process's draft worker,
            if there is one, drafts for these requests.
    """

    def __init__(
        self, fleet: Fleet, connection: ConnectionConfig, card: ModelCard, draft: RunningDraft | None = None
    ) -> None:
        self.fleet = fleet
        self.card = card
        self.draft = draft
        self.remote = FailoverCompleter(fleet, connection, None if draft is None else draft.worker.complete)
        self._serves = True  # a server has just answered
        self._fault = ""  # reason why the servers cannot be used, as logged

    @property
    def completer(self) -> Completer:
        """Return the object that completes requests, which it sends to the servers.

        If there is a draft whose tokenizer fits, this process turns the tokens of answers into text; else the servers
        do so.
        """
        return self.remote if self.draft is None else TextCompleter(self.remote, self._writer)

    def _writer(self) -> Tokenizer | None:
        own = None if self.draft is None else self.draft.worker.reader.tokenizer
        return None if own is None or own.text_fingerprint != self.card.text_fingerprint else own

    async def is_serving(self) -> bool:
        """Return whether the servers' model fits the draft, and one of the servers, which are asked now, serves."""
        return self._serves and await self.fleet.is_serving()

    async def follow(self, show: Callable[[ModelCard], None], report: Callable[[bool], None]) -> None:
        """Follow without end which of the servers are ready, and which model they have.

        Args:
            show: function that gets the card of the model when the servers have another one.
            report: function that is called with whether any server can be used, at once and when that may have changed.
        """
        async with aclosing(self.fleet.serves()) as changes:
            async for serves in changes:
                self._serves = serves and await self._fits(show)
                report(self._serves)

    async def _fits(self, show: Callable[[ModelCard], None]) -> bool:
        """Ask the servers for their model, and follow it if it has changed; return whether it can be used.

        If the servers do not answer, return True, since they may just be busy; they are asked again later.
        """
        fault, may_change = "", False
        try:
            card = await _card(self.fleet, None if self.draft is None else self.draft.loaded.vocabulary)
            if card != self.card:
                if self.draft is not None:
                    await self.draft.follow(card)
                self.card = card
                show(card)
                logger.info("the servers have model %s", card.name)
        except SpecDecError as exc:
            fault = str(exc) if isinstance(exc, REFUSALS) else ""
            may_change = not isinstance(exc, IncompatibleDraftError)
            if fault not in ("", self._fault):
                logger.error("not ready until another target is at %s: %s", self.fleet.label, exc)
        if may_change:
            self.fleet.look_again()
        self._fault = fault
        return not fault


@asynccontextmanager
async def edge(
    connection: ConnectionConfig, drafting: Drafting | None = None, headers: Headers = dict
) -> AsyncGenerator[Edge, None]:
    """Yield an `Edge`, once a server of `connection` answers and the draft that `drafting` names is loaded.

    Args:
        drafting: settings of a draft for this process's requests; None: it has no draft.
        headers: function that returns headers for each call to a server.

    Raises:
        ConfigError: the draft cannot be loaded.
        UnavailableError: no server answers in time.
        IncompatibleDraftError: the draft has another vocabulary than the target, or the server is no target.
    """
    async with connected(connection, headers) as fleet:
        if drafting is None:
            yield Edge(fleet, connection, await _first_card(fleet, connection.connect_timeout_s, None))
            return
        own = await asyncio.to_thread(Tokenizer.load, drafting.proposer.tokenizer_path)
        words = Vocabulary(own.fingerprint, own.num_ids)
        card = await _first_card(fleet, connection.connect_timeout_s, words)  # fail now, not after minutes of loading
        loaded = await load_proposer(drafting.proposer)
        path = drafting.proposer.tokenizer_path
        async with private_draft(loaded, path, drafting.config, fleet, card) as draft:
            yield Edge(fleet, connection, card, draft)


async def _first_card(fleet: Fleet, patience_s: float, draft: Vocabulary | None) -> ModelCard:
    """Ask the servers for the card of their model, as `_card` does, until one answers, for up to `patience_s` seconds.

    Servers may be busy at first. Errors that last until a server is replaced (`REFUSALS`) are raised at once.

    Args:
        draft: vocabulary of the draft; None if the process has none.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + patience_s
    while True:
        try:
            return await _card(fleet, draft)
        except SpecDecError as exc:
            if isinstance(exc, REFUSALS) or loop.time() + RETRY_S > ends_at:
                raise
        await asyncio.sleep(RETRY_S)


async def _card(fleet: Fleet, draft: Vocabulary | None) -> ModelCard:
    """Return the card that describes the servers' model, after a check that the draft, if there is one, fits it.

    Args:
        draft: vocabulary of the draft; None if the process has none.

    Raises:
        IncompatibleDraftError: the draft has another vocabulary, or the servers are not targets.
        SpecDecError: the call failed.
    """
    if draft is None:
        return await card_of(fleet)
    card = await card_of_target(fleet)
    require_one_vocabulary(draft, Vocabulary(card.tokenizer_fingerprint, card.vocab_size))
    return card


@asynccontextmanager
async def private_draft(
    loaded: LoadedDraft, path: Path, config: DraftConfig, fleet: Fleet, card: ModelCard
) -> AsyncGenerator[RunningDraft, None]:
    """Run an engine over a loaded draft, and a worker that drafts with it for this process's requests to servers.

    Args:
        path: directory of the tokenizer in whose token ids the draft drafts.
        fleet: the servers.
        card: description of the servers' model.
    """
    reader = await _reader(loaded, path, card)
    async with running(draft_engine(loaded, max_waiting=config.max_waiting)) as engine:
        own = replace(config, num_threads=loaded.num_threads)
        worker = PrivateWorker(engine, fleet, own, loaded.vocabulary, reader)
        try:
            await worker.until_attached()
            yield RunningDraft(loaded, path, engine, worker)
        finally:
            await worker.stop()


async def _reader(draft: LoadedDraft, path: Path, card: ModelCard) -> Reader:
    """Return a reader of requests with the draft's tokenizer, and the chat template, limits and defaults of `card`.

    Args:
        path: directory of that tokenizer.
    """
    words = await asyncio.to_thread(draft.tokenizer.with_template, card.chat_template, path)
    return Reader(words, max_length=card.max_length, vocab_size=card.vocab_size, defaults=card.defaults)


async def serve_edge(
    connection: ConnectionConfig,
    server: ServerConfig,
    http: HttpConfig | None,
    observe: ObserveConfig,
    drafting: Drafting | None = None,
) -> None:
    """Serve clients over gRPC, HTTP or both, whichever has a port, until a signal.

    The port for probes opens at once, the others when a server has answered and the draft is loaded.

    Raises:
        ConfigError: a port is taken, or the draft cannot be loaded.
        UnavailableError: no server answers in time.
        IncompatibleDraftError: the draft has another vocabulary than the target, or the server is no target.
    """
    ports = Ports(server, observe, None if http is None else replace(http, deadline_s=connection.deadline_s))
    behind: Edge | None = None

    async def is_serving() -> bool:
        return behind is not None and await behind.is_serving()

    async with AsyncExitStack() as stack:
        observers = stack.enter_context(observed(observe))
        for front in ports.probe_fronts(is_serving):
            await stack.enter_async_context(opened(front))
        stopped = asyncio.create_task(stop_signal())  # a container's first process ignores signals without a handler
        stack.callback(stopped.cancel)
        opening = asyncio.create_task(stack.enter_async_context(edge(connection, drafting, observers.headers)))
        stack.callback(opening.cancel)
        await asyncio.wait([stopped, opening], return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            behind = opening.result()
            await _serve(behind, ports, observers, stopped)


async def _serve(behind: Edge, ports: Ports, observers: Observers, stopped: asyncio.Task[Signals]) -> None:
    """Open the ports of a process in front of servers, and serve until a signal.

    Args:
        behind: connection to the servers, with the process's draft if it has one.
        ports: ports to open.
        observers: what to record about requests.
        stopped: task that ends at a signal.
    """
    metrics = _metrics(behind, ports.name_of(behind.card), observers.config.role)
    completer = observers.around(behind.completer, metrics, model=ports.name_of(behind.card))
    draft, engine = behind.draft, None if behind.draft is None else behind.draft.engine
    work = completer if engine is None else EdgeWork(completer, engine)
    metrics.watch(work)
    operation = Operation(work, may_drain=ports.server.ends_by_call)
    service = GenerationServicer(completer, behind.card, behind.remote, operation)

    def show(card: ModelCard) -> None:
        service.card = replace(card, topology=GATEWAY if draft is None else DISTRIBUTED)
        ports.show(card if draft is None else service.card)

    fronts = ports.fronts(observers, metrics, [service], behind.is_serving)
    show(behind.card)
    following = asyncio.create_task(behind.follow(show, ports.report_upstream))
    try:
        with nullcontext() if engine is None else timeline(observers.config, engine):
            host = Host(work, fronts, config=ports.server, metrics=metrics, operation=operation)
            await host.run(until=stopped)
    finally:
        following.cancel()


def _metrics(behind: Edge, name: str, role: str) -> Metrics:
    metrics, draft = Metrics(name, role=role), behind.draft
    metrics.watch_upstream(lambda: behind.fleet.replicas)
    if draft is not None:
        metrics.watch_graphs([draft.loaded.model])
        metrics.watch_vocabulary(lambda: draft.worker.vocabulary_share)
        metrics.watch_undrafted(lambda: draft.worker.num_undrafted)
    return metrics


class EdgeWork(DraftWork):
    """The requests and the draft engine of a process that drafts for its own requests to targets, as one `Work`.

    A `Host` watches and drains it (host.py).
    """

    def __init__(self, completer: SupervisedCompleter, engine: DraftEngine) -> None:
        super().__init__(engine)
        self._completer = completer
        self.num_slots = engine.num_slots

    @property
    def num_running(self) -> int:
        """Return the number of requests whose answer has begun and not ended, with or without drafts."""
        return self._completer.num_running

    @property
    def num_waiting(self) -> int:
        return self._completer.num_waiting

    async def stop(self, *, grace_s: float) -> None:
        """Let requests finish for `grace_s` seconds, in which the engine still drafts for them; then fail the rest."""
        await self._completer.stop(grace_s=grace_s)
