"""The auth file: who there is, by the hash of a token or the name in a certificate, and what each may do.

    [[token]]
    name = "alice"
    sha256 = "..."               # of the token; the token itself is nowhere here
    roles = ["client"]           # client, draft, worker, ops, admin
    limits = { in_flight = 4, max_tokens = 1024, n = 2, logprobs = 5 }

    [[certificate]]
    name = "edge-1"
    san = "spiffe://example.org/edge-1"    # a DNS name or a URI of the certificate
    roles = ["draft"]

`speaks_for_others = true` is for gateways: they may say for whom they ask.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from grpc_comm.watched import UnusableError
from inference.caller import Caller, Limits, Right

_KEYS = {"name", "roles", "limits", "speaks_for_others"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@:/-]{1,64}")


@dataclass(frozen=True, slots=True)
class AuthFile:
    """Everybody who is known."""

    tokens: tuple[tuple[Caller, bytes], ...]
    certificates: dict[str, Caller]

    def of_token(self, token: str) -> Caller | None:
        """Whose token it is. Takes as long for each, known or not."""
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for who, known in self.tokens:
            if hmac.compare_digest(known, digest):
                found = who
        return found

    def of_certificate(self, names: Sequence[str]) -> Caller | None:
        """Whose certificate has one of these names."""
        return next((self.certificates[name] for name in names if name in self.certificates), None)


def read_auth_file(path: Path) -> AuthFile:
    """Everybody in the file.

    Raises:
        UnusableError: something in it is not as it must be; nothing of a half-written file is used.
    """
    try:
        return _parsed(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as exc:
        raise UnusableError(f"{path}: {exc}") from exc


def _parsed(document: dict[str, Any]) -> AuthFile:
    _refuse_others(document, {"token", "certificate"}, "the file")
    tokens = [(_caller(entry, "sha256"), _sha256(entry)) for entry in document.get("token", ())]
    certificates = [(_caller(entry, "san"), str(entry["san"])) for entry in document.get("certificate", ())]
    if not tokens and not certificates:
        raise ValueError("names nobody, who could do nothing: at least one [[token]] or [[certificate]] is expected")
    _refuse_twice([who.name for who, _ in (*tokens, *certificates)], "name")
    _refuse_twice([digest.hex() for _, digest in tokens], "sha256")
    _refuse_twice([san for _, san in certificates], "san")
    return AuthFile(tuple(tokens), {san: who for who, san in certificates})


def _caller(entry: dict[str, Any], key: str) -> Caller:
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r} is none of 1 to 64 letters, digits and .@:/_-")
    _refuse_others(entry, {*_KEYS, key}, name)
    if not entry.get(key):
        raise ValueError(f"{name}: {key} is missing")
    roles = entry.get("roles", [])
    if unknown := [role for role in roles if role not in list(Right)] or not roles:
        raise ValueError(f"{name}: roles {unknown if roles else roles} are none of {', '.join(Right)}")
    rights = frozenset(map(Right, roles))
    return Caller(name, rights, _limits(entry.get("limits", {}), name), entry.get("speaks_for_others") is True)


def _limits(entry: dict[str, Any], name: str) -> Limits:
    _refuse_others(entry, {field.name for field in fields(Limits)}, f"limits of {name}")
    for key, value in entry.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < (key != "logprobs"):
            raise ValueError(f"{name}: limit {key} {value!r} is no whole number from {int(key != 'logprobs')} on")
    return Limits(**entry)


def _sha256(entry: dict[str, Any]) -> bytes:
    text = str(entry.get("sha256", ""))
    if not _SHA256.fullmatch(text):
        raise ValueError(f"{entry.get('name')}: sha256 is not 64 hexadecimal digits")
    return bytes.fromhex(text)


def _refuse_others(entry: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _refuse_twice(values: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value} is there twice")
        seen.add(value)
