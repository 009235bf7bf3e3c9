"""Role token: makes an access token, prints it, and writes its hash into the auth file."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.caller import Right
from specdec.inference.config import SERVICE_FLAGS, ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.settings import REQUIRED, group, setting

SECTION = "token"


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Settings of --role token, which makes an access token.

    Attributes:
        auth_file: file of callers and their rights; created if it does not exist (docs/security.md).
        name: owner of the token, for the log.
        grant: right of the token's owner: client, worker, ops or admin; may be given several times.
        speaks_for_others: for a gateway or a serving draft: servers trust the account that it names in each request.
    """

    auth_file: Path = setting(REQUIRED, "--auth_file FILE", section=SECTION)
    name: str = setting(REQUIRED, "--name", section=SECTION)
    grant: tuple[str, ...] = setting(
        REQUIRED, "--grant ROLE", choices=tuple(right.value for right in Right), section=SECTION
    )
    speaks_for_others: bool = setting(False, "--speaks_for_others", section=SECTION)
    observe: ObserveConfig = group(ObserveConfig, role="token", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: TokenSettings) -> int:
    """Make an access token, add its hash to the auth file, and print the token alone to stdout; return exit code 0.

    Servers that run accept the token from their next request on.
    """
    print(new_token(settings.auth_file, settings.name, settings.grant, speaks_for_others=settings.speaks_for_others))
    return 0


def new_token(auth_file: Path, name: str, grant: Sequence[str], *, speaks_for_others: bool = False) -> str:
    """Make an access token, add its hash to the auth file, and return the token.

    Args:
        name: owner of the token.
        grant: rights of the owner.
        speaks_for_others: whether servers trust the account that the owner names in each request.

    Raises:
        ConfigError: the file is not valid, or cannot be written.
    """
    token = f"specdec-{secrets.token_urlsafe(32)}"
    digest, rights = hashlib.sha256(token.encode()).hexdigest(), json.dumps(list(dict.fromkeys(grant)))
    entry = f'\n[[token]]\nname = "{name}"\nsha256 = "{digest}"\nroles = {rights}\n'
    _add(auth_file, entry + "speaks_for_others = true\n" * speaks_for_others)
    return token


def _add(file: Path, entry: str) -> None:
    """Append an entry to the auth file in one step, so that no server reads half of it.

    Raises:
        ConfigError: the file would not be valid with the entry, or cannot be written.
    """
    from specdec.grpc_comm.watched import UnusableError
    from specdec.inference.workers.calls.auth_file import read_auth_file

    part = file.with_name(f"{file.name}.part")
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(before + entry)
        if file.exists():  # keep owner and mode, so that a server that runs as another user can still read it
            os.chown(part, file.stat().st_uid, file.stat().st_gid)
            part.chmod(stat.S_IMODE(file.stat().st_mode))
        read_auth_file(part)
        part.replace(file)
    except UnusableError as exc:
        part.unlink()
        raise ConfigError(str(exc).replace(str(part), str(file))) from exc
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{file}: {exc.strerror or exc}") from exc
