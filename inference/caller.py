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
    """What somebody may do: the roles of an auth file."""

    CLIENT = "client"
    DRAFT = "draft"
    WORKER = "worker"
    OPS = "ops"
    ADMIN = "admin"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one caller's requests; None is no limit but the server's own.

    Attributes:
        in_flight: requests at once.
        max_tokens: output tokens of one.
        n: choices of one.
        logprobs: alternatives to each token.
    """

    in_flight: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks.

    Attributes:
        name: as the auth file has it; empty where nobody needs one.
        rights: what they may do.
        speaks_for_others: may say for whom they ask, as a gateway does.
        user: for whom they ask, if it is somebody else.
        prefix_groups: by account, the group whose members share prefixes; other accounts share theirs with no other.
    """

    name: str = ""
    rights: frozenset[Right] = ALL_RIGHTS
    limits: Limits = Limits()
    speaks_for_others: bool = False
    user: str = ""
    prefix_groups: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def account(self) -> str:
        """On whose account a request goes."""
        return self.user or self.name

    def cache_salt(self, given: str) -> str:
        """Return the salt of a request's prefixes: the client's own, and different for each account or group.

        It is a digest, so that no salt that a client may choose meets another account's, and the same on every server.
        Without an auth file there are no accounts, and the client's salt stays as it is.
        """
        if not self.account:
            return given
        group = self.prefix_groups.get(self.account)
        owner = ("account", self.account) if group is None else ("group", group)
        return hashlib.sha256(json.dumps([*owner, given]).encode()).hexdigest()


ANYBODY = Caller()


@dataclass(slots=True)
class _Serving:
    """A request that is being served; `is_accounted`: it has left a line in the log."""

    caller: Caller
    request_id: str
    is_accounted: bool = False


_NOTHING = _Serving(ANYBODY, "")  # no request: whether it is accounted for, nobody asks
_SERVING: ContextVar[_Serving] = ContextVar("serving", default=_NOTHING)
_audit = logging.getLogger("specdec.audit")
_HARMLESS = re.compile(r"[\x21-\x7e]{1,128}")


def caller() -> Caller:
    """Whose request this is."""
    return _SERVING.get().caller


def request_id() -> str:
    """Of this request, in all processes that serve it; empty outside of any."""
    return _SERVING.get().request_id


def harmless_id(given: str) -> str:
    """The id that a request came with, or a new one."""
    return given if _HARMLESS.fullmatch(given) else secrets.token_hex(16)


@contextmanager
def serving(who: Caller, id_: str) -> Generator[str, None, None]:
    """What the block does, it does for this request; gives the id."""
    token = _SERVING.set(_Serving(who, id_))
    try:
        yield id_
    finally:
        _SERVING.reset(token)


def is_accounted() -> bool:
    """Whether this request has left a line already."""
    return _SERVING.get().is_accounted


def account_for(status: str, *, model: str = "-", num_tokens: int = 0, seconds: float = 0.0) -> None:
    """Write what became of this request, or of one of its choices: never a text, a token id or a secret."""
    _SERVING.get().is_accounted = True
    who, line = caller(), "request=%s caller=%s user=%s model=%s tokens=%d seconds=%.3f status=%s"
    _audit.info(line, request_id(), who.name or "-", who.user or "-", model, num_tokens, seconds, status)


class NamesRequests(logging.Filter):
    """Gives each record that is written while a request is served its id, for formats with `%(request)s`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always shown."""
        record.request = f"[{id_}] " if (id_ := request_id()) else ""
        return True
