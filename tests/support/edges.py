"""A client with a draft worker in the same process; a script instead of a model proposes the draft tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.config import PLAIN, ConnectionConfig, DialSecurity, DraftConfig
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.request import Schedule
from specdec.inference.serving.assembly import LoadedDraft
from specdec.inference.serving.edge import private_draft
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.remote import TARGET
from specdec.inference.workers.completion import ModelCard
from specdec.inference.workers.drafting.private import PrivateWorker
from tests.support.models import tiny_tokenizer
from tests.support.scripted import VOCAB_SIZE, ScriptedProposer

WORDS = Vocabulary("f", VOCAB_SIZE)


@dataclass
class Edge:
    """A client and a draft worker in its process, with the draft engine and the scripted proposer behind the worker."""

    completer: FailoverCompleter
    worker: PrivateWorker
    engine: DraftEngine
    proposer: ScriptedProposer


@asynccontextmanager
async def edge(
    port: int, schedule: Schedule = Schedule.ASYNC, *, security: DialSecurity = PLAIN, max_waiting: int = 4
) -> AsyncGenerator[Edge, None]:
    """Run a client and its draft worker for the target on `port`; yield them once the worker is attached or refused.

    `security` is that of the connection; `max_waiting` requests may queue for the draft engine.
    """
    proposer = ScriptedProposer()
    draft = LoadedDraft(proposer, Tokenizer(tiny_tokenizer(), frozenset()), WORDS)
    connection = ConnectionConfig("127.0.0.1", port, 60.0, security=security)
    config = DraftConfig(connection, gamma=4, schedule=schedule, max_waiting=max_waiting)
    card = ModelCard("target", TARGET, proposer.max_length, VOCAB_SIZE, WORDS.fingerprint)
    async with connected(connection) as fleet, private_draft(draft, Path(), config, fleet, card) as running:
        completer = FailoverCompleter(fleet, connection, running.worker.complete)
        yield Edge(completer, running.worker, running.engine, proposer)
