"""Request context: caller, request id and audit line, in a context variable. Knows no token and no certificate."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class Right(StrEnum):
    """Right of a caller, as the auth file lists it under `roles`."""

    CLIENT = "client"
    WORKER = "worker"
    OPS = "ops"
    ADMIN = "admin"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits of one caller's requests; None leaves only the server's own limit.

    Attributes:
        in_flight: requests at once.
        max_tokens: output tokens of one request.
        n: choices of one request.
        logprobs: alternatives to each token.
    """

    in_flight: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request.

    Attributes:
        name: name in the auth file; empty on a server without one.
        rights: rights of the caller.
        speaks_for_others: True if the caller may name another account with each request, as a gateway does.
        user: account that the caller named, if any.
        prefix_groups: by account, the group in which it shares prefixes; an account without a group shares none.
    """

    name: str = ""
    rights: frozenset[Right] = ALL_RIGHTS
    limits: CallerLimits = CallerLimits()
    speaks_for_others: bool = False
    user: str = ""
    prefix_groups: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def account(self) -> str:
        """Return the name of the account to which the request is charged: the named user, or the caller itself."""
        return self.user or self.name

    def cache_salt(self, given: str) -> str:
        """Return the salt that separates cached prefixes: made of the client's salt and its account or prefix group.

        A digest, so that no client can choose another account's salt; it is the same on every server. Without an auth
        file there are no accounts, and the client's salt stays as it is.
        """
        if not self.account:
            return given
        group = self.prefix_groups.get(self.account)
        owner = ("account", self.account) if group is None else ("group", group)
        return hashlib.sha256(json.dumps([*owner, given]).encode()).hexdigest()

    def owner(self, cache_salt: str) -> str:
        """Return the key under which answers are kept: a digest of account and salt, shared by no group."""
        return hashlib.sha256(json.dumps([self.account, cache_salt]).encode()).hexdigest()


ANYBODY = Caller()


@dataclass(slots=True)
class _Current:
    """Request that is served, with its caller, id and peer; `is_audited` is True once its audit line is written."""

    caller: Caller
    request_id: str
    peer: str
    is_audited: bool = False


_NOTHING = _Current(ANYBODY, "", "-")  # no request: nothing reads whether it is audited
_CURRENT: ContextVar[_Current] = ContextVar("serving", default=_NOTHING)
_log = logging.getLogger("specdec.audit")
_HARMLESS = re.compile(r"[\x21-\x7e]{1,128}")


def caller() -> Caller:
    """Return the caller of the current request."""
    return _CURRENT.get().caller


def request_id() -> str:
    """Return the id of the current request, the same in all processes that serve it; empty outside of a request."""
    return _CURRENT.get().request_id


def safe_request_id(given: str) -> str:
    """Return the id that a request came with if it is safe to log, else a new one."""
    return given if _HARMLESS.fullmatch(given) else secrets.token_hex(16)


@contextmanager
def request_context(who: Caller, id_: str, peer: str = "") -> Generator[str, None, None]:
    """Make this request the current one during the block; yield its id.

    The peer is the address from which the request came, for audit lines; empty: that of the request around the block.
    """
    token = _CURRENT.set(_Current(who, id_, peer or _CURRENT.get().peer))
    try:
        yield id_
    finally:
        _CURRENT.reset(token)


def is_audited() -> bool:
    """Return whether the current request's audit line is written."""
    return _CURRENT.get().is_audited


def audit(status: str, *, model: str = "-", num_tokens: int = 0, seconds: float = 0.0) -> None:
    """Write the audit line of the current request or of one of its choices, without any text, token id or secret.

    Equals signs in `status` are escaped: it may repeat a peer's path, whose words must not look like fields.
    """
    now, status = _CURRENT.get(), status.replace("=", "\\x3d")
    now.is_audited, who = True, now.caller
    line = "request=%s peer=%s caller=%s user=%s model=%s tokens=%d seconds=%.3f status=%s"
    _log.info(line, now.request_id, now.peer, who.name or "-", who.user or "-", model, num_tokens, seconds, status)


class NamesRequests(logging.Filter):
    """Filter that adds the request's id to each record, for formats with `%(request)s`; audit lines have it already.

    A line about a request that is not the current one names it by `extra={"request_id": ...}`. Lines of asyncio get no
    id: most are about objects that the garbage collector finds, whichever request runs.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the request's id to the record; return True, so that the record is logged."""
        id_ = getattr(record, "request_id", request_id())
        record.request = f"[{id_}] " if id_ and record.name not in (_log.name, "asyncio") else ""
        return True


MAX_LINE_CHARACTERS = 4096


class OneLine(logging.Formatter):
    """Formatter that escapes control characters and cuts long lines.

    So a peer's text can neither end nor forge a line of the log, nor fill the disk with a few long lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a record's line, with its message cut and escaped; the traceback after it is not changed."""
        text = record.message
        if len(text) > MAX_LINE_CHARACTERS:
            text = record.message = f"{text[:MAX_LINE_CHARACTERS]}... ({len(text)} characters)"
        if not text.isprintable():
            record.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        return super().formatMessage(record)
