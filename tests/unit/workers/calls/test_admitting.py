"""Session names of private draft workers are valid within one account and connection."""

from __future__ import annotations

from specdec.inference.caller import Caller, request_context
from specdec.inference.workers.calls.admitting import private_scope


def scope(name: str, user: str = "", peer: str = "ipv4:127.0.0.1:1") -> str:
    with request_context(Caller(name, speaks_for_others=bool(user), user=user), "1"):
        return private_scope(peer)


def test_the_worker_of_an_edge_drafts_for_all_of_its_users() -> None:
    """The target uses an edge's draft worker for requests of all of the edge's users.

    It was once otherwise: an edge sent a request for alice, and the target looked for a worker of alice, not of the
    edge.
    """
    assert scope("edge", user="alice") == scope("edge", user="bob") == scope("edge")


def test_no_worker_drafts_for_another_caller_or_connection() -> None:
    assert len({scope("edge"), scope("alice"), scope("edge", peer="ipv4:127.0.0.1:2")}) == 3
