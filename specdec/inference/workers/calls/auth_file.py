"""The auth file: callers, by the hash of a token or the name in a certificate, and what each may do.

    [[token]]
    name = "alice"
    sha256 = "..."               # hash of the token, which is not in the file itself
    roles = ["client"]           # client, worker, ops, admin
    limits = { in_flight = 4, max_tokens = 1024, n = 2, logprobs = 5 }

    [[certificate]]
    name = "edge-1"
    san = "spiffe://example.org/edge-1"    # a DNS name or a URI of the certificate
    roles = ["client"]

    [[prefix_group]]
    name = "shop"
    accounts = ["alice", "bob"]            # share cached prefixes of their prompts; all others keep theirs apart

`speaks_for_others = true` is for gateways: they may name the user of a request.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specdec.grpc_comm.watched import UnusableError
from specdec.inference.caller import Caller, CallerLimits, Right

logger = logging.getLogger(__name__)

_KEYS = {"name", "roles", "limits", "speaks_for_others"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[\w.@:/-]{1,64}")


@dataclass(frozen=True, slots=True)
class AuthFile:
    """Content of an auth file: callers by the SHA-256 of their tokens, and by the names in their certificates."""

    tokens: dict[bytes, Caller]
    certificates: dict[str, Caller]

    def of_token(self, token: str) -> Caller | None:
        """Return the caller with this access token; None if there is none.

        How long this takes reveals nothing about valid tokens, since only hashes are compared.
        """
        return self.tokens.get(hashlib.sha256(token.encode()).digest())

    def of_certificate(self, names: Sequence[str]) -> Caller | None:
        """Return the caller whose entry in the file has one of a certificate's `names`; None if there is none."""
        return next((self.certificates[name] for name in names if name in self.certificates), None)


def read_auth_file(path: Path) -> AuthFile:
    """Read an auth file; return the callers that it names.

    Raises:
        UnusableError: the file is not valid; no part of it is used then, since it may be half written.
    """
    try:
        return _parsed(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as exc:
        raise UnusableError(f"{path}: {exc}") from exc


def _parsed(document: dict[str, Any]) -> AuthFile:
    _refuse_others(document, {"token", "certificate", "prefix_group"}, "the file")
    groups: dict[str, str] = {}  # filled below: its names are checked against those of the callers
    tokens = [(_caller(entry, "sha256", groups), _sha256(entry)) for entry in document.get("token", ())]
    certificates = [(_caller(entry, "san", groups), str(entry["san"])) for entry in document.get("certificate", ())]
    if not tokens and not certificates:
        raise ValueError(
            "names no caller; one [[token]] or [[certificate]] at least is needed. A running server KEEPS ITS CALLERS: "
            "to revoke all of them, leave one entry with the hash of a token that was never given out"
        )
    _refuse_twice([who.name for who, _ in (*tokens, *certificates)], "name")
    _refuse_twice([digest.hex() for _, digest in tokens], "sha256")
    _refuse_twice([san for _, san in certificates], "san")
    groups.update(_prefix_groups(document.get("prefix_group", []), [who for who, _ in (*tokens, *certificates)]))
    return AuthFile({digest: who for who, digest in tokens}, {san: who for who, san in certificates})


def _caller(entry: dict[str, Any], key: str, groups: Mapping[str, str]) -> Caller:
    name = _name(entry.get("name"), "name")
    _refuse_others(entry, {*_KEYS, key}, name)
    if not entry.get(key):
        raise ValueError(f"{name}: {key} is missing")
    roles = [_successor(role, name) for role in entry.get("roles", [])]
    if unknown := [role for role in roles if role not in list(Right)] or not roles:
        raise ValueError(f"{name}: roles {unknown if roles else roles} are none of {', '.join(Right)}")
    rights = frozenset(map(Right, roles))
    speaks = entry.get("speaks_for_others", False)
    if not isinstance(speaks, bool):
        raise ValueError(f"{name}: speaks_for_others {speaks!r} is neither true nor false")
    return Caller(name, rights, _limits(entry.get("limits", {}), name), speaks, prefix_groups=groups)


def _successor(role: Any, name: str) -> Any:
    """Return a role as it is; but for "draft", a role of earlier versions, return "client" and log a warning."""
    if role != "draft":
        return role
    logger.warning('%s: role "draft" counts as "client", which may draft for its own requests', name)
    return Right.CLIENT


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{what} {value!r} is none of 1 to 64 letters, digits and .@:/_-")
    return value


def _prefix_groups(entries: Any, callers: Sequence[Caller]) -> dict[str, str]:
    """Return, for each account in a prefix group (accounts that share cached beginnings of prompts), the group's name.

    Each account must be the name of a caller in the file, unless some caller speaks for others: then it may be a user
    that this caller names.

    Raises:
        ValueError: an entry is malformed, or an account is refused or belongs to two groups.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"prefix_group {entries!r} is not a list of tables: [[prefix_group]] is expected")
    known = {who.name for who in callers}
    names_all = not any(who.speaks_for_others for who in callers)
    groups: dict[str, str] = {}
    for entry in entries:
        group = _name(entry.get("name"), "name of a prefix_group:")
        for account in _accounts(entry, group):
            if account in groups:
                raise ValueError(f"prefix_group {group}: account {account} is in {groups[account]} already")
            if names_all and account not in known:
                raise ValueError(f"prefix_group {group}: account {account} has no entry in this file")
            groups[account] = group
    _refuse_twice([entry["name"] for entry in entries], "prefix_group")
    return groups


def _accounts(entry: dict[str, Any], group: str) -> list[str]:
    where = f"prefix_group {group}"
    _refuse_others(entry, {"name", "accounts"}, where)
    accounts = entry.get("accounts")
    if not isinstance(accounts, list) or not accounts:
        raise ValueError(f"{where}: accounts {accounts!r} must be a list of at least one name")
    return [_name(account, f"{where}: account") for account in accounts]


def _limits(entry: dict[str, Any], name: str) -> CallerLimits:
    _refuse_others(entry, {field.name for field in fields(CallerLimits)}, f"limits of {name}")
    for key, value in entry.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < (key != "logprobs"):
            raise ValueError(f"{name}: limit {key} {value!r} must be a whole number from {int(key != 'logprobs')} on")
    return CallerLimits(**entry)


def _sha256(entry: dict[str, Any]) -> bytes:
    text = str(entry.get("sha256", ""))
    if not _SHA256.fullmatch(text):
        raise ValueError(f"{entry.get('name')}: sha256 is not 64 hexadecimal digits")
    return bytes.fromhex(text)


def _refuse_others(entry: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _refuse_twice(values: Iterable[str], what: str) -> None:
    for value, num in Counter(values).items():
        if num > 1:
            raise ValueError(f"{what} {value} is there twice")
