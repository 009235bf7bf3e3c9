"""VerificationService of a target: draft workers attach, each with one stream for all of its sessions."""

from __future__ import annotations

import asyncio

import grpc

from grpc_comm.call import Call
from grpc_comm.options import max_request_bytes
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.caller import Right, caller
from inference.engine.pool import DraftPool
from inference.errors import IncompatibleDraftError, InvalidRequestError
from inference.text.tokenizer import MAX_PACKED_BYTES, Tokenizer
from inference.text.vocabulary import Vocabulary, require_one_vocabulary
from inference.workers.calls.access import require_any
from inference.workers.calls.admitting import private_scope
from inference.workers.calls.convert import PROTOCOL_VERSION
from inference.workers.drafting.assist import StreamWorker, serve_worker


class VerificationServicer(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Translator between VerificationService and the pool; owns no algorithm.

    Args:
        pool: pool of the draft workers that attach.
        vocabulary: vocabulary of the target, in whose ids draft workers draft.
        tokenizer: tokenizer of the target, for draft workers that have another one; None refuses these.
    """

    service_name = pb.DESCRIPTOR.services_by_name["VerificationService"].full_name

    def __init__(self, pool: DraftPool, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None) -> None:
        self._pool = pool
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer

    @property
    def max_request_bytes(self) -> int:
        """See `Servicer`."""
        return max_request_bytes(self._pool.max_length)

    def add_to(self, server: grpc.aio.Server) -> None:
        """See `Servicer`."""
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, call: Call) -> None:
        """Serve one draft worker until it leaves."""
        message = await call.read()
        if message == grpc.aio.EOF or message.WhichOneof("message") != "attach":
            raise InvalidRequestError("the first message of a draft worker must be Attach")
        attach = message.attach
        if not attach.is_private:
            require_any({Right.WORKER}, caller())
        attached = await self._attached(attach)
        worker = StreamWorker(attach, self._vocabulary, private_scope(call.peer) if attach.is_private else "")
        await serve_worker(worker, self._pool, call, attached)

    async def _attached(self, attach: pb.Attach) -> pb.Attached:
        """Return the answer to a worker, with the tokenizer if it has another one and takes this one.

        Raises:
            IncompatibleDraftError: the worker does not fit. One of version 1 is a worker of the pool, as it is today.
        """
        if not 1 <= attach.protocol_version <= PROTOCOL_VERSION:
            fault = f"the draft worker speaks protocol version {attach.protocol_version}"
            raise IncompatibleDraftError(f"{fault}, the target 1 to {PROTOCOL_VERSION}")
        attached = pb.Attached(pass_us=self._pool.pass_us)
        words = Vocabulary(attach.tokenizer_fingerprint, attach.vocab_size)
        if words.fingerprint != self._vocabulary.fingerprint and attach.takes_tokenizer and self._tokenizer is not None:
            packed = await asyncio.to_thread(self._tokenizer.packed)
            if len(packed) <= MAX_PACKED_BYTES:
                attached.tokenizer = packed
                attached.eos_token_ids.extend(sorted(self._tokenizer.eos_token_ids))
                return attached
        require_one_vocabulary(words, self._vocabulary)
        return attached
