"""Who asks, as calls of gRPC say it: to servers that have it from here, and from clients that pass it on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from grpc_comm.errors import StatusError
from grpc_comm.interceptors import REQUEST_ID, Admit
from grpc_comm.secured import AUTHORIZATION
from inference.caller import Caller, caller, harmless_id, request_id, serving
from inference.errors import ForbiddenError, UnauthenticatedError
from inference.workers.access import Access, rights_of_call
from inference.workers.status import to_status

logger = logging.getLogger(__name__)

USER = "x-specdec-user"
MAX_USER_CHARACTERS = 64


def admission(access: Access) -> Admit:
    """What lets calls in as `access` says, and makes known who asks while they are served."""

    def admit(method: str, headers: Mapping[str, str], names: Sequence[str] | None) -> AbstractContextManager[str]:
        id_ = harmless_id(headers.get(REQUEST_ID, ""))
        try:
            who = _caller(access, method, headers.get(AUTHORIZATION, ""), names)
        except (UnauthenticatedError, ForbiddenError) as exc:
            with serving(caller(), id_):
                logger.warning("refused %s: %s", method, exc)
            status = to_status(exc)
            assert status is not None
            raise StatusError(status) from None
        if who.speaks_for_others:
            who = replace(who, user=headers.get(USER, "")[:MAX_USER_CHARACTERS])
        return serving(who, id_)

    return admit


def _caller(access: Access, method: str, authorization: str, names: Sequence[str] | None) -> Caller:
    rights = rights_of_call(method)
    if names is None:
        return access.by_token(authorization, rights)
    return access.by_certificate(names, authorization, rights)


def passed_on() -> dict[str, str]:
    """Headers of a call that serves a request: its id, and who asks."""
    headers = {REQUEST_ID: request_id(), USER: caller().account}
    return {name: value for name, value in headers.items() if value}
