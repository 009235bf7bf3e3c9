"""Certificates for a trial on two machines: `--tls_self_signed DIR`."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from inference.config import ServerConfig
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

DAYS = 90
CLIENT_NAME = "specdec-client"


def make_certificates(server: ServerConfig) -> None:
    """Make the certificates that a server's settings want to find in a folder.

    Raises:
        ConfigError: they cannot be written.
    """
    folder = server.security.self_signed
    if folder is None:
        return
    try:
        if make_trial(folder, server.host):
            logger.info("made certificates for a trial in %s; clients need --tls_ca %s", folder, folder / "ca.pem")
    except OSError as exc:
        raise ConfigError(f"--tls_self_signed {folder}: {exc}") from exc


def make_trial(folder: Path, host: str) -> bool:
    """Write ca.pem, server.pem and client.pem, and the keys of the last two, unless the folder has them.

    The CA's own key is forgotten: nobody can issue more later.

    Args:
        host: that the server listens on; its certificate names it, this machine, and loopback.

    Raises:
        OSError: they cannot be written.
    """
    import trustme

    files = ("server.key", "server.pem", "client.key", "client.pem", "ca.pem")
    if all((folder / name).is_file() for name in files):
        return False
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, ends = trustme.CA(organization_name="specdec trial"), datetime.now(UTC) + timedelta(days=DAYS)
    for stem, names in (("server", _names_of_this_machine(host)), ("client", [CLIENT_NAME])):
        issued = authority.issue_cert(*names, not_after=ends)
        key = folder / f"{stem}.key"
        key.touch(0o600)
        issued.private_key_pem.write_to_path(key)
        (folder / f"{stem}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return True


def _names_of_this_machine(host: str) -> list[str]:
    """For others, there is --tls_server_name."""
    names = [socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1", "::1", host]
    with suppress(OSError):
        names += [str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(name for name in names if name not in ("", "0.0.0.0", "::")))
