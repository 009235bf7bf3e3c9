"""Certificates of a CA for tests, as files."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from specdec.grpc_comm.tls import ClientTls
from tests.support.authority import Authority, Issued


@dataclass(frozen=True)
class Pki:
    """A certificate authority for tests, and the folder of the certificates that it issued."""

    folder: Path
    authority: Authority = field(default_factory=Authority)

    @property
    def ca(self) -> Path:
        path = self.folder / "ca.pem"
        path.write_bytes(self.authority.pem)
        return path

    def pair(self, stem: str, *names: str, expired: bool = False) -> tuple[Path, Path]:
        """Write a certificate and its key to files with this stem, over existing ones; return both paths."""
        begins = datetime.now(UTC) - timedelta(days=10) if expired else None
        issued = self.authority.issue(names or ("localhost", "127.0.0.1"), begins=begins, days=9 if expired else 30)
        return self.write(stem, issued)

    def write(self, stem: str, issued: Issued) -> tuple[Path, Path]:
        cert, key = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert.write_bytes(issued.cert)
        key.write_bytes(issued.key)
        return cert, key

    def client(self, *names: str) -> ClientTls:
        """Return TLS settings of a client that trusts this CA, with a client certificate if `names` are given."""
        return ClientTls(self.ca, *(self.pair("client", *names) if names else ()))


def pki(folder: Path) -> Pki:
    folder.mkdir(exist_ok=True)
    return Pki(folder)
