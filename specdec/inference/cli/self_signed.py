"""TLS certificates for trying servers on two machines, made by `--tls_self_signed DIR`."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.inference.config import ServerConfig
from specdec.inference.errors import ConfigError

if TYPE_CHECKING:
    import trustme

logger = logging.getLogger(__name__)

DAYS = 90
CLIENT_NAME = "specdec-client"
_FILES = ("server.key", "server.pem", "client.key", "client.pem", "ca.pem")
_CA_KEY = "trial_ca.key"  # absent from a folder that an operator filled, so its certificates are never replaced
_LABEL = r"(?!-|..--)[a-z0-9-]{1,63}(?<!-)"
_DNS_NAME = re.compile(rf"(?!.*\.arpa$){_LABEL}(\.{_LABEL})*")


def make_certificates(server: ServerConfig) -> None:
    """Make a CA and certificates in the folder that --tls_self_signed names; do nothing if it names none.

    Raises:
        ConfigError: certificates cannot be written, or those in the folder were not issued by the CA beside them.
    """
    folder = server.security.self_signed
    try:
        if folder is not None:
            make_trial(folder, server.host)
    except OSError as exc:
        raise ConfigError(f"--tls_self_signed {folder}: {exc}") from exc


def make_trial(folder: Path, host: str) -> None:
    """Write a new CA, with certificates and keys that it issues, into a folder.

    If the folder has them already, add only the names that its server.pem lacks.

    Args:
        host: address that the server listens on. The certificate names it, this machine, the addresses of all its
            interfaces, and loopback.

    Raises:
        OSError: the folder has no certificates, and they cannot be written.
        ConfigError: certificates that are in the folder were not issued by the CA beside them.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone_in(folder):
        if all((folder / name).is_file() for name in _FILES):
            _add_names(folder, host)
            if (folder / _CA_KEY).is_file():
                _require_chain(folder)
        else:
            _make(folder, host)


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Hold a lock on the folder during the block, so that servers that start together do not write two CAs there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_chain(folder: Path) -> None:
    """Raise ConfigError unless the CA in the folder has issued the certificates beside it."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    authority, *issued = [folder / name for name in ("ca.pem", "server.pem", "client.pem")]
    for path in issued:
        try:
            own, ca = (x509.load_pem_x509_certificate(each.read_bytes()) for each in (path, authority))
            own.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature) as exc:
            way = "remove the folder and start again; clients then need its new ca.pem"
            fault = f"--tls_self_signed {folder}: {authority.name} has not issued {path.name}"
            raise ConfigError(f"{fault}: {way}") from exc


def _make(folder: Path, host: str) -> None:
    import trustme

    authority = trustme.CA(organization_name="specdec trial")
    _write_key(folder / _CA_KEY, authority.private_key_pem)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    _issue(authority, folder, "server", _spelled([*_names_of_this_machine(host), socket.getfqdn()]))
    _issue(authority, folder, "client", [CLIENT_NAME])
    logger.info("made certificates for a trial in %s; clients need --tls_ca %s", folder, folder / "ca.pem")


def _add_names(folder: Path, host: str) -> None:
    """Issue server.pem again if it lacks a name of this machine; by the same CA, so clients need no new ca.pem."""
    import trustme

    cert = folder / "server.pem"
    named = _names_in(cert)
    new = [name for name in _spelled(_names_of_this_machine(host)) if name not in named]
    if not new:
        return
    try:
        authority = trustme.CA.from_pem((folder / "ca.pem").read_bytes(), (folder / _CA_KEY).read_bytes())
        _issue(authority, folder, "server", [*named, *new])
        logger.info("%s now names %s too; clients keep their ca.pem", cert, ", ".join(new))
    except (OSError, ValueError) as exc:
        way = f"dial with --tls_server_name and one of {', '.join(named)}"
        logger.warning("%s does not name %s: %s (%s)", cert, ", ".join(new), way, exc)


def _issue(authority: trustme.CA, folder: Path, stem: str, names: list[str]) -> None:
    issued = authority.issue_cert(*names, not_after=datetime.now(UTC) + timedelta(days=DAYS))
    _write_key(folder / f"{stem}.key", issued.private_key_pem)
    (folder / f"{stem}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))


def _write_key(path: Path, key: trustme.Blob) -> None:
    path.touch(0o600)
    key.write_to_path(path)


def _names_in(cert: Path) -> list[str]:
    """Return the DNS names and the IP addresses for which a certificate is valid; none if it cannot be read."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate(cert.read_bytes())
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _names_of_this_machine(host: str) -> list[str]:
    """Return the names and addresses under which clients may reach this machine.

    They are found without a DNS look-up, which takes long on a machine without a DNS server.
    """
    return [host, socket.gethostname(), "localhost", "127.0.0.1", "::1", *_interface_addresses()]


def _spelled(names: Iterable[str]) -> list[str]:
    """Return each name once, as a certificate spells it; drop names that identify no machine, such as 0.0.0.0."""
    return list(dict.fromkeys(spelled for name in names if (spelled := _spelling(name)) is not None))


def _spelling(name: str) -> str | None:
    try:
        address = ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return name.lower() if _DNS_NAME.fullmatch(name.lower()) else None
    needs_zone = address.version == 6 and address.is_link_local
    return None if address.is_unspecified or needs_zone else str(address)


def _interface_addresses() -> Iterator[str]:
    """Yield this machine's IP addresses from Linux's tables, since Python's standard library does not list them."""
    with suppress(OSError):
        routes = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
        yield from (line.split()[-1] for line, kind in pairwise(routes) if kind.split() == ["/32", "host", "LOCAL"])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            yield str(ip_address(bytes.fromhex(line.split()[0])))
