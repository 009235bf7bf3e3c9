"""Admission of gRPC calls: it finds each call's caller and request id, and makes the headers that pass them on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from specdec.grpc_comm.guard import Admit, Trailers
from specdec.grpc_comm.secured import AUTHORIZATION
from specdec.inference.caller import Caller, audit, caller, is_audited, request_context, request_id, safe_request_id
from specdec.inference.errors import ForbiddenError, InvalidRequestError, UnauthenticatedError
from specdec.inference.workers.calls.access import ASSIST, DRAIN, Access, rights_of_call
from specdec.inference.workers.calls.auth_file import NAME
from specdec.inference.workers.calls.status import code_name

REQUEST_ID = "x-request-id"
USER = "x-specdec-user"
ASK_AGAIN_S = 5.0
"""Seconds between two checks that the caller of a running `Assist` stream is still allowed to make that call."""
_NOTED = (ASSIST, DRAIN)
"""gRPC methods of which every call is written to the audit log: the caller of `Assist` gets the prompts of all clients,
and `Drain` ends the server."""


def admission(access: Access) -> Admit:
    """Return the function that admits gRPC calls by the rules of `access`.

    While a call is served, it also makes the call's caller and request id the current ones (inference/caller.py).
    """

    def admit(
        method: str, headers: Mapping[str, str], names: Sequence[str] | None, peer: str
    ) -> tuple[Trailers, AbstractContextManager[None]]:
        id_ = safe_request_id(headers.get(REQUEST_ID, ""))
        identify = partial(_caller, access, method, headers.get(AUTHORIZATION, ""), names)
        return ((REQUEST_ID, id_),), _admitted(identify, headers.get(USER, ""), id_, method, peer)

    return admit


def _for_user(who: Caller, user: str) -> Caller:
    """Return the caller, charged to the account `user` if that is not empty and the caller may speak for others.

    Callers that may speak for others are gateways, for example; the `user` of any other caller is ignored.

    Raises:
        InvalidRequestError: `user` is not valid as the name of an account, because it has a space for example.
    """
    if not who.speaks_for_others:
        return who
    if user and not NAME.fullmatch(user):
        raise InvalidRequestError(f"{USER} {user!r:.80} must be 1 to 64 letters, digits and .@:/_-")
    return replace(who, user=user)


@contextmanager
def _admitted(
    identify: Callable[[], Caller], user: str, id_: str, method: str, peer: str
) -> Generator[None, None, None]:
    """Admit a gRPC call, and make its caller and id the current ones while the block serves it.

    Args:
        identify: function that returns the call's caller, or raises if the caller may not make the call.
        user: account that the caller names in the header `USER`; empty if it names none.
        id_: id of the request.
        method: full name of the gRPC method.
        peer: address of the client.

    Raises:
        UnauthenticatedError, ForbiddenError: the caller may not make this call, or may no longer make it.
        InvalidRequestError: the name of the user is not valid.
    """
    try:
        who = _for_user(identify(), user)
    except (UnauthenticatedError, ForbiddenError, InvalidRequestError) as exc:
        with request_context(Caller(exc.caller_name), id_, peer):
            audit(f"{code_name(exc)} at {method}: {exc}")
        raise
    with _audited(who, id_, method, peer), _while_welcome(identify, who) if method == ASSIST else nullcontext():
        yield


@contextmanager
def _while_welcome(identify: Callable[[], Caller], who: Caller) -> Generator[None, None, None]:
    """Cancel the block, which serves an endless call of `who`, once `who` is no longer admitted or has lost a right.

    Every `ASK_AGAIN_S` seconds, `identify` is asked again: it returns the caller with its present rights, or raises.

    Raises:
        UnauthenticatedError, ForbiddenError: the reason why the block was cancelled.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    refusal: Exception | None = None
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal refusal, timer
        try:
            if lost := who.rights - identify().rights:
                raise ForbiddenError(f"{who.name} has lost role {', '.join(sorted(lost))}")
        except (UnauthenticatedError, ForbiddenError) as exc:
            refusal = exc
            if task is not None:
                task.cancel()
        else:
            timer = loop.call_later(ASK_AGAIN_S, look)

    timer = loop.call_later(ASK_AGAIN_S, look)
    try:
        yield
    except asyncio.CancelledError:
        if refusal is None or (task is not None and task.uncancel() > 0):
            raise
        raise refusal from None
    finally:
        timer.cancel()


@contextmanager
def _audited(who: Caller, id_: str, method: str, peer: str) -> Generator[None, None, None]:
    """Write a line to the audit log if the gRPC call that the block serves fails, or is of a method in `_NOTED`.

    No line is written if the call has written one itself, or if its caller has no name, as without an auth file.
    """
    with request_context(who, id_, peer):
        began, status = time.monotonic(), "CANCELLED" if method in _NOTED else "OK"
        try:
            yield
            status = "OK"
        except Exception as exc:
            status = code_name(exc)
            raise
        finally:
            is_news = status != "OK" or method in _NOTED
            if who.name and is_news and method.startswith("/specdec.") and not is_audited():
                audit(f"{status} at {method}", seconds=time.monotonic() - began)


def _caller(access: Access, method: str, authorization: str, names: Sequence[str] | None) -> Caller:
    rights = rights_of_call(method)
    if names is None:
        return access.by_token(authorization, rights)
    return access.by_certificate(names, authorization, rights)


def private_scope(peer: str) -> str:
    """Return the prefix that the target puts before the session names of a client that drafts for its own requests.

    It consists of the caller's name and its connection's address `peer`, so that clients cannot draft for each other.
    It does not name a user, since one draft worker drafts for the requests of all users of its process.
    """
    return f"{caller().name} {peer}/"


def passed_on() -> dict[str, str]:
    """Return the headers that pass the current request's id and account on to the server that answers it."""
    headers = {REQUEST_ID: request_id(), USER: caller().account}
    return {name: value for name, value in headers.items() if value}
