"""Who asks, as calls of gRPC say it: to servers that have it from here, and from clients that pass it on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from grpc_comm.errors import StatusError
from grpc_comm.interceptors import REQUEST_ID, Admit
from grpc_comm.secured import AUTHORIZATION
from inference.caller import Caller, account_for, caller, harmless_id, is_accounted, request_id, serving
from inference.errors import ForbiddenError, InvalidRequestError, UnauthenticatedError
from inference.workers.access import ASSIST, DRAIN, Access, rights_of_call
from inference.workers.status import code_name, to_status

USER = "x-specdec-user"
MAX_USER_CHARACTERS = 64
ASK_AGAIN_S = 5.0
"""Between two looks whether a pool worker is still one."""
_NOTED = (ASSIST, DRAIN)
"""Calls that leave a line however they end: who was sent everybody's prompts, and who ended the server."""


def admission(access: Access) -> Admit:
    """What lets calls in as `access` says, and makes known who asks while they are served."""

    def admit(method: str, headers: Mapping[str, str], names: Sequence[str] | None) -> AbstractContextManager[str]:
        id_ = harmless_id(headers.get(REQUEST_ID, ""))
        try:
            who = _caller(access, method, headers.get(AUTHORIZATION, ""), names)
            who = _for_user(who, headers.get(USER, ""))
        except (UnauthenticatedError, ForbiddenError, InvalidRequestError) as exc:
            with serving(caller(), id_):
                account_for(f"{code_name(exc)} at {method}: {exc}")
            status = to_status(exc)
            assert status is not None
            raise StatusError(status, request_id=id_) from None
        admitted = _accounted(who, id_, method)
        if method != ASSIST:
            return admitted
        return _while_welcome(admitted, lambda: _caller(access, method, headers.get(AUTHORIZATION, ""), names))

    return admit


def _for_user(who: Caller, user: str) -> Caller:
    """Return the caller with the user it speaks for. A longer name is not cut: two users would be one account.

    Raises:
        InvalidRequestError: the name is too long.
    """
    if not who.speaks_for_others:
        return who
    if len(user) > MAX_USER_CHARACTERS:
        raise InvalidRequestError(f"{USER} has {len(user)} characters, the limit is {MAX_USER_CHARACTERS}")
    return replace(who, user=user)


@contextmanager
def _while_welcome(admitted: AbstractContextManager[str], ask: Callable[[], object]) -> Generator[str, None, None]:
    """A call that may last for ever; it ends when `ask` finds that its caller would not be let in any more."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    refusal: Exception | None = None
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal refusal, timer
        try:
            ask()
        except (UnauthenticatedError, ForbiddenError) as exc:
            refusal = exc
            if task is not None:
                task.cancel()
        else:
            timer = loop.call_later(ASK_AGAIN_S, look)

    timer = loop.call_later(ASK_AGAIN_S, look)
    with admitted as id_:
        try:
            yield id_
        except asyncio.CancelledError:
            if refusal is None or (task is not None and task.uncancel() > 0):
                raise
            raise refusal from None
        finally:
            timer.cancel()


@contextmanager
def _accounted(who: Caller, id_: str, method: str) -> Generator[str, None, None]:
    """A call that is served; one of ours that fails before anybody has accounted for it leaves a line all the same."""
    with serving(who, id_):
        began, status = time.monotonic(), "CANCELLED" if method in _NOTED else "OK"
        try:
            yield id_
            status = "OK"
        except Exception as exc:
            status = code_name(exc)
            raise
        finally:
            is_news = status != "OK" or method in _NOTED
            if who.name and is_news and method.startswith("/specdec.") and not is_accounted():
                account_for(f"{status} at {method}", seconds=time.monotonic() - began)


def _caller(access: Access, method: str, authorization: str, names: Sequence[str] | None) -> Caller:
    rights = rights_of_call(method)
    if names is None:
        return access.by_token(authorization, rights)
    return access.by_certificate(names, authorization, rights)


def passed_on() -> dict[str, str]:
    """Headers of a call that serves a request: its id, and who asks."""
    headers = {REQUEST_ID: request_id(), USER: caller().account}
    return {name: value for name, value in headers.items() if value}
