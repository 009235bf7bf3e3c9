"""Certificates for tests, issued by a CA of their own and written to files."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from specdec.grpc_comm.tls import ClientTls
from tests.support.authority import Authority, Issued


@dataclass(frozen=True)
class Pki:
    """A certificate authority for tests, with the folder into which its certificates are written."""

    folder: Path
    authority: Authority = field(default_factory=Authority)

    @property
    def ca(self) -> Path:
        path = self.folder / "ca.pem"
        path.write_bytes(self.authority.pem)
        return path

    def pair(self, stem: str, *names: str, expired: bool = False) -> tuple[Path, Path]:
        """Issue a certificate, for localhost if there are no `names`; return the paths of certificate and key.

        The files are `stem`.pem and `stem`.key in the folder; files of these names are overwritten.
        """
        begins = datetime.now(UTC) - timedelta(days=10) if expired else None
        issued = self.authority.issue(names or ("localhost", "127.0.0.1"), begins=begins, days=9 if expired else 30)
        return self.write(stem, issued)

    def write(self, stem: str, issued: Issued) -> tuple[Path, Path]:
        cert, key = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert.write_bytes(issued.cert)
        key.write_bytes(issued.key)
        return cert, key

    def client(self, *names: str) -> ClientTls:
        """Return TLS settings that trust this CA; with `names` they have a client certificate for these."""
        return ClientTls(self.ca, *(self.pair("client", *names) if names else ()))


def pki(folder: Path) -> Pki:
    folder.mkdir(exist_ok=True)
    return Pki(folder)
