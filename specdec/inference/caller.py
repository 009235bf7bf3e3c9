"""Context of the request that is served now: its caller and its id, in a context variable; and audit lines.

Knows nothing of how callers prove who they are, by tokens or certificates.
"""

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
    """Right of a caller; the auth file lists those of each caller under `roles`.

    Attributes:
        CLIENT: get answers, and draft for them.
        WORKER: draft for the requests of all callers.
        OPS: read metrics and load.
        ADMIN: drain the server, which ends it, and read its load.
    """

    CLIENT = "client"
    WORKER = "worker"
    OPS = "ops"
    ADMIN = "admin"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits of one caller's requests, beside those of the server; None sets no limit.

    Attributes:
        in_flight: most requests at once.
        max_tokens: most output tokens of one request.
        n: most choices (outputs) of one HTTP request.
        logprobs: most alternatives to each token that a request may ask log-probabilities of.
    """

    in_flight: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, by the server's auth file.

    Attributes:
        name: name in the auth file; empty on a server without one.
        rights: rights of the caller.
        limits: limits of the caller's requests.
        speaks_for_others: True if the caller may name another account with each request, as a gateway does.
        user: account that the caller named; empty if it named none.
        prefix_groups: group of each account. Accounts of a group share cached prefixes of prompts; an account without a
            group shares none.
    """

    name: str = ""
    rights: frozenset[Right] = ALL_RIGHTS
    limits: CallerLimits = CallerLimits()
    speaks_for_others: bool = False
    user: str = ""
    prefix_groups: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def account(self) -> str:
        """Return the name of the account to which the request is charged: the user if one is named, else the caller."""
        return self.user or self.name

    def cache_salt(self, given: str) -> str:
        """Return the salt of a request's cached prefix: requests with other salts do not share it.

        It is a digest of the account or its prefix group, and of the salt `given` by the client. So no client can
        choose another account's salt, and it is the same on every server. Without an auth file there are no accounts,
        and the salt is the client's own.
        """
        if not self.account:
            return given
        group = self.prefix_groups.get(self.account)
        owner = ("account", self.account) if group is None else ("group", group)
        return hashlib.sha256(json.dumps([*owner, given]).encode()).hexdigest()

    def owner(self, cache_salt: str) -> str:
        """Return the key under which a request's answer is kept, so that later requests copy draft tokens from it.

        The key is a digest of the account and of `cache_salt`, the salt that the client gave. Unlike a cached prefix,
        an answer is never shared within a group of accounts.
        """
        return hashlib.sha256(json.dumps([self.account, cache_salt]).encode()).hexdigest()


ANYBODY = Caller()


@dataclass(slots=True)
class _Current:
    """Facts about one request that every part of a server may need while it serves the request.

    Attributes:
        caller: who made the request.
        request_id: id of the request, the same in all processes that serve it.
        peer: address from which the request came.
        is_audited: True once the request's audit line is written.
    """

    caller: Caller
    request_id: str
    peer: str
    is_audited: bool = False


_NOTHING = _Current(ANYBODY, "", "-")  # no request: nothing reads whether it is audited
_CURRENT: ContextVar[_Current] = ContextVar("serving", default=_NOTHING)
_log = logging.getLogger("specdec.audit")
_HARMLESS = re.compile(r"[\x21-\x7e]{1,128}")


def caller() -> Caller:
    """Return the caller of the current request; outside of a request `ANYBODY`."""
    return _CURRENT.get().caller


def request_id() -> str:
    """Return the id of the current request, the same in all processes that serve it; empty outside of a request."""
    return _CURRENT.get().request_id


def safe_request_id(given: str) -> str:
    """Return the id that came with a request if it is short printable ASCII without spaces, else a new one."""
    return given if _HARMLESS.fullmatch(given) else secrets.token_hex(16)


@contextmanager
def request_context(who: Caller, id_: str, peer: str = "") -> Generator[str, None, None]:
    """Make a request the current one during the block; yield its id.

    Args:
        who: caller of the request.
        id_: id of the request.
        peer: address from which the request came, for audit lines; empty: the peer of the request that was current
            before the block.
    """
    token = _CURRENT.set(_Current(who, id_, peer or _CURRENT.get().peer))
    try:
        yield id_
    finally:
        _CURRENT.reset(token)


def is_audited() -> bool:
    """Return whether the audit line of the current request was written."""
    return _CURRENT.get().is_audited


def audit(status: str, *, model: str = "-", num_tokens: int = 0, seconds: float = 0.0) -> None:
    """Write an audit line about the current request, or one of its choices, without any text, token id or secret.

    Args:
        status: how the request ended. Equals signs in it are escaped, since it may repeat a path that a peer sent,
            whose words must not look like further fields of the line.
        model: name of the model; "-" if there is none.
        num_tokens: number of output tokens.
        seconds: time that the request took.
    """
    now, status = _CURRENT.get(), status.replace("=", "\\x3d")
    now.is_audited, who = True, now.caller
    line = "request=%s peer=%s caller=%s user=%s model=%s tokens=%d seconds=%.3f status=%s"
    _log.info(line, now.request_id, now.peer, who.name or "-", who.user or "-", model, num_tokens, seconds, status)


class NamesRequests(logging.Filter):
    """Logging filter that adds the current request's id to each record, for formats with `%(request)s`.

    A line about another request names it by `extra={"request_id": ...}`. Audit lines have the id in their text. Lines
    of asyncio get none, since most are about objects that the garbage collector finds, whichever request runs.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the request's id to the record; return True, so that the record is logged."""
        id_ = getattr(record, "request_id", request_id())
        record.request = f"[{id_}] " if id_ and record.name not in (_log.name, "asyncio") else ""
        return True


MAX_LINE_CHARACTERS = 4096


class OneLine(logging.Formatter):
    """Logging formatter that escapes control characters in messages, and cuts long ones.

    So a text that a peer has sent can neither end nor forge a line of the log, nor fill the disk by its length.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line for a record, with its message cut and escaped; called by `format`, which adds tracebacks."""
        text = record.message
        if len(text) > MAX_LINE_CHARACTERS:
            text = record.message = f"{text[:MAX_LINE_CHARACTERS]}... ({len(text)} characters)"
        if not text.isprintable():
            record.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        return super().formatMessage(record)
