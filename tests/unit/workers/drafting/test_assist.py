"""A target tells its pool workers which request they help."""

from __future__ import annotations

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.caller import ANYBODY, request_context
from specdec.inference.engine.target_session import TargetSession
from specdec.inference.request import GenerationRequest
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.drafting.service import StreamWorker


def test_a_worker_knows_the_request_that_it_helps() -> None:
    """A worker gets the id of the request that it helps, though a session is lent outside of its request's context."""
    with request_context(ANYBODY, "abc"):
        session = TargetSession(GenerationRequest((1, 2, 3)), max_length=100, gamma=4)
    worker = StreamWorker(pb.Attach(num_slots=1), Vocabulary("f", 1000))
    worker.open(session)
    opened = worker.outbox.get_nowait().open
    assert (opened.session_id, opened.request_id) == (session.help_id, "abc")
