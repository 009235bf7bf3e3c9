"""gRPC service of a target to which draft workers attach, each by one Assist stream for all requests it drafts for."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import grpc

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.options import max_request_bytes
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.caller import Right, caller
from specdec.inference.commit import Commit
from specdec.inference.config import usable_core_ids
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.pool import MAX_WORKERS, DraftPool
from specdec.inference.errors import CapacityError, IncompatibleDraftError, InvalidRequestError, UnavailableError
from specdec.inference.request import Noise, Schedule
from specdec.inference.text.tokenizer import MAX_PACKED_BYTES, Tokenizer
from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary
from specdec.inference.workers.calls.access import require_any
from specdec.inference.workers.calls.admitting import private_scope
from specdec.inference.workers.calls.convert import (
    PROTOCOL_VERSION,
    branches_from_message,
    commit_to_message,
    noise_to_message,
    open_to_message,
    padded,
)
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES

_numbers = itertools.count(1)
_PRIVATE_NAME = re.compile(f"[0-9a-f]{{{2 * DRAFT_SESSION_BYTES}}}")
MAX_OUTBOX = 1000
MAX_OUTBOX_BYTES = 16 * 1024 * 1024
"""Most bytes of messages, some with whole prompts, that may wait to be sent to one draft worker; if more wait, the
worker's stream ends."""
PRIVATE_SHARE = 8
"""Limit of a client's private draft workers, which draft for its own requests alone: while n of them are attached, it
may attach another one only if more than n * `PRIVATE_SHARE` of the `MAX_WORKERS` places for such workers are free."""
MAX_WORKER_SLOTS = 4096
"""Most requests for which one draft worker may offer to draft at a time."""
HEARTBEAT_S = 20.0
"""Seconds between messages on an idle stream: some proxies end a stream without messages after 30 s, despite PINGs."""


class StreamWorker:
    """Draft worker at the other end of an Assist stream, for the pool that assigns workers to a target's requests.

    Messages to it are queued, so that the engine never waits for the network.

    Args:
        attach: the worker's first message.
        vocabulary: vocabulary of the target.
        scope: for a private worker, which drafts for its own client's requests alone, the prefix of their names; empty
            for a worker that may draft for any request.

    Attributes:
        does_rounds: True if the worker can draft in rounds (`Schedule.SYNC`), waiting for each verification.
        takes_hold: True if the worker knows the message that asks it to stop drafting for a while.
        num_slots: number of requests for which the worker can draft at a time.
        overflowed: event that is set when too many messages wait to be sent to the worker.
    """

    def __init__(self, attach: pb.Attach, vocabulary: Vocabulary, scope: str = "") -> None:
        self.scope = scope
        self.does_rounds = attach.protocol_version > 1
        self.takes_hold = attach.takes_hold
        self.id = f"w{next(_numbers)}"
        self.num_slots = checked_slots(attach.num_slots)
        self.outbox: asyncio.Queue[pb.AssistResponse] = asyncio.Queue(MAX_OUTBOX)
        self.overflowed = asyncio.Event()
        self._num_bytes = 0
        self._vocabulary = vocabulary

    def open(self, session: VerificationSession) -> None:
        """Ask the worker to draft for a session (a request at the target), from the session's present tokens on.

        Do nothing for a private worker: it drafts for the requests of its own process, so it knows the request already.
        """
        if self.scope:
            return
        request = session.request
        rest = request.resumed(session.token_ids[len(request.prompt_token_ids) :])
        schedule = Schedule.ASYNC if session.runs_ahead else Schedule.SYNC
        opening = replace(rest, schedule=schedule)
        words = self._vocabulary
        message = open_to_message(opening, fingerprint=words.fingerprint, vocab_size=words.size)
        opened = pb.AssistOpen(session_id=session.help_id, open=message, request_id=session.request_id)
        self._put(pb.AssistResponse(open=opened))

    def commit(self, session: VerificationSession, commit: Commit) -> None:
        """Tell the worker which tokens of a session (a request at the target) are now committed.

        Do nothing for a private worker, which reads them from the answer to its own process's request.
        """
        if self.scope:
            return
        message = pb.AssistCommit(session_id=session.help_id, commit=commit_to_message(commit))
        self._put(padded(pb.AssistResponse(commit=message)))

    def close(self, session: VerificationSession) -> None:
        """Ask the worker to stop drafting for a session (a request at the target), which has ended or moved."""
        session_id = session.request.draft_session.removeprefix(self.scope) if self.scope else session.help_id
        self._put(pb.AssistResponse(close=pb.AssistClose(session_id=session_id)))

    def hold(self, number: int, *, is_on: bool) -> None:
        """Ask the worker to stop drafting for all requests, or to go on; do nothing if it does not know this message.

        Args:
            number: number by which the worker acknowledges that it has stopped.
            is_on: True to stop, False to go on.
        """
        if self.takes_hold:
            self._put(pb.AssistResponse(hold=pb.AssistHold(is_on=is_on, number=number)))

    async def beat(self) -> None:
        """Every `HEARTBEAT_S` seconds, queue an empty message unless other messages wait; go on until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self.outbox.empty():
                self._put(pb.AssistResponse())

    def _put(self, message: pb.AssistResponse) -> None:
        if self.outbox.full() or self._num_bytes > MAX_OUTBOX_BYTES:
            self.overflowed.set()
            return
        self._num_bytes += message.ByteSize()
        self.outbox.put_nowait(message)

    async def write(self, call: Call) -> None:
        """Send queued messages to the worker over its stream `call`, until cancelled."""
        while True:
            message = await self.outbox.get()
            self._num_bytes -= message.ByteSize()
            await call.write(message)


def checked_slots(num_slots: int) -> int:
    """Return `num_slots`, the number of requests for which a worker offers to draft at a time.

    Raises:
        InvalidRequestError: the number is below 1 or above `MAX_WORKER_SLOTS`.
    """
    if not 1 <= num_slots <= MAX_WORKER_SLOTS:
        raise InvalidRequestError(f"num_slots {num_slots} is outside 1..{MAX_WORKER_SLOTS}")
    return num_slots


async def serve_worker(worker: StreamWorker, pool: DraftPool, call: Call, attached: pb.Attached) -> None:
    """Let the pool use a draft worker until its stream ends.

    Args:
        worker: worker at the other end of the stream.
        pool: pool that assigns workers to the target's requests.
        call: the worker's Assist stream.
        attached: message that the worker gets first.

    Raises:
        InvalidRequestError: the worker sent a message that is not valid.
        UnavailableError: the worker does not read its messages.
    """
    attached.worker_id = worker.id
    pool.attach(worker)  # before its client knows, the next request of which counts on it
    tasks: list[asyncio.Task[None]] = []
    try:
        await call.write(pb.AssistResponse(attached=attached))
        del attached  # its tokenizer takes megabytes, and the stream lasts for days
        jobs = (_read(worker, pool, call), worker.write(call), _overflow(worker), worker.beat())
        tasks += map(asyncio.create_task, jobs)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        pool.detach(worker)


async def _read(worker: StreamWorker, pool: DraftPool, call: Call) -> None:
    while (message := await call.read()) != grpc.aio.EOF:
        kind = message.WhichOneof("message")
        if kind == "decline":
            pool.decline(worker, _session(worker, message.decline.session_id))
        elif kind == "slots":
            worker.num_slots = checked_slots(message.slots.num_slots)
            pool.resized(worker)
        elif kind == "held":
            pool.held(worker, message.held.number)
        elif kind == "propose":
            branches = branches_from_message(message.propose.propose)
            pool.propose(worker, _session(worker, message.propose.session_id), branches)
        else:
            raise InvalidRequestError(
                "a worker attaches once; every later message must be propose, decline, slots or held"
            )


def _session(worker: StreamWorker, name: str) -> str:
    """Return `name`, by which a worker's message names the request that it is about; for a private worker, check it.

    A private worker's name must have the form of `draft_session`: it is kept until the request arrives, so its length
    must have a limit.

    Raises:
        InvalidRequestError: a private worker's name has another form.
    """
    if worker.scope and not _PRIVATE_NAME.fullmatch(name):
        fault = f"session_id {name!r:.40} of a private worker must be draft_session of its request"
        raise InvalidRequestError(f"{fault}, in {2 * DRAFT_SESSION_BYTES} hexadecimal digits", field="session_id")
    return name


async def _overflow(worker: StreamWorker) -> None:
    await worker.overflowed.wait()
    raise UnavailableError(f"the worker has left {worker.outbox.qsize()} messages unread")


class VerificationServicer(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Implementation of the gRPC VerificationService, which connects draft workers with the pool of a target.

    Args:
        pool: pool that assigns the attached draft workers to the target's requests.
        vocabulary: vocabulary of the target; draft workers draft in its ids.
        tokenizer: tokenizer of the target, for draft workers that have another one; None: these are refused.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md); draft and
            target must have the same.
        num_threads: number of CPU threads of the target model; 0: not known.
    """

    service_name = pb.DESCRIPTOR.services_by_name["VerificationService"].full_name

    def __init__(
        self,
        pool: DraftPool,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer | None = None,
        noise: Noise = Noise.SPECDEC,
        num_threads: int = 0,
    ) -> None:
        self._pool, self._noise, self._num_threads = pool, noise, num_threads
        self._places: Counter[str] = Counter()  # of private workers, by client
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer

    @property
    def max_request_bytes(self) -> int:
        """Return the length in bytes of the longest message that the service's methods accept."""
        return max_request_bytes(self._pool.max_length)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this service with a gRPC server, which must not have started yet."""
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, call: Call) -> None:
        """Attach one draft worker to the target, and exchange messages with it until its stream ends.

        Raises:
            InvalidRequestError: the first message is not Attach, or a later one is not valid.
            ForbiddenError: the caller may draft only for its own requests, and wants to draft for others.
            CapacityError: the client has as many private workers as it may.
            IncompatibleDraftError: the worker's protocol version or vocabulary does not fit.
            UnavailableError: the worker does not read its messages.
        """
        message = await call.read()
        if message == grpc.aio.EOF or message.WhichOneof("message") != "attach":
            raise InvalidRequestError("the first message of a draft worker must be Attach")
        attach = message.attach
        if not attach.is_private:
            require_any({Right.WORKER}, caller())
        if self._shares_cores(attach, call.peer):
            self._pool.engine.drafting.begin_off()
        worker = StreamWorker(attach, self._vocabulary, private_scope(call.peer) if attach.is_private else "")
        with self._place(call.peer) if attach.is_private else nullcontext():
            await serve_worker(worker, self._pool, call, await self._attached(attach))

    def _shares_cores(self, attach: pb.Attach, peer: str) -> bool:
        """Return whether a worker runs on this machine, shares CPU cores with the target, and has too many threads.

        It has too many if both models together have more threads than the cores that they may use.
        """
        own, theirs = set(usable_core_ids()), set(attach.cpu_ids)
        num_threads = self._num_threads + attach.num_threads
        is_here = peer.startswith(("127.", "[::1]")) or peer == "-"  # a unix socket has no address
        return is_here and not own.isdisjoint(theirs) and len(own | theirs) < num_threads

    @contextmanager
    def _place(self, peer: str) -> Generator[None, None, None]:
        """Count a private draft worker, which drafts for its own client's requests, while the block serves it.

        At most `MAX_WORKERS` may be attached. So that many clients can attach some, a client may attach one more only
        while it has fewer than an eighth of the number that may still be attached. A client is a caller of the auth
        file, or without such a file an IP address.

        Raises:
            CapacityError: the client has as many workers as it may.
        """
        name = caller().name or peer.rpartition(":")[0]
        num, num_free = self._places[name], MAX_WORKERS - self._places.total()
        if num * PRIVATE_SHARE >= num_free:
            fault = f"{name} has {num} private draft workers attached, its share while {num_free} places are free"
            raise CapacityError(fault, retry_after_s=60.0)
        self._places[name] += 1
        try:
            yield
        finally:
            self._places[name] -= 1
            self._places += Counter()  # without those that hold no place

    async def _attached(self, attach: pb.Attach) -> pb.Attached:
        """Return the answer to a worker that attaches, with the target's tokenizer if the worker needs and takes it.

        Raises:
            IncompatibleDraftError: the worker's protocol version, or its vocabulary, does not fit.
        """
        if not 1 <= attach.protocol_version <= PROTOCOL_VERSION:
            fault = f"the draft worker speaks protocol version {attach.protocol_version}"
            raise IncompatibleDraftError(f"{fault}, the target 1 to {PROTOCOL_VERSION}")
        attached = pb.Attached(pass_us=self._pool.engine.pass_us, noise=noise_to_message(self._noise))
        words = Vocabulary(attach.tokenizer_fingerprint, attach.vocab_size)
        takes_it = attach.takes_tokenizer and not attach.is_private  # a private worker reads its requests as we do
        if words.fingerprint != self._vocabulary.fingerprint and takes_it and self._tokenizer is not None:
            packed = await asyncio.to_thread(self._tokenizer.packed)
            if len(packed) <= MAX_PACKED_BYTES:
                attached.tokenizer = packed
                attached.eos_token_ids.extend(sorted(self._tokenizer.eos_token_ids))
                return attached
        require_one_vocabulary(words, self._vocabulary)
        return attached
