"""Certificate authority for tests: issues certificates for host names, IP addresses or URIs, also expired ones."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 90


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, both in PEM."""

    cert: bytes
    key: bytes


class Authority:
    """A certificate authority whose key exists only in memory, so that it issues nothing after the test."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "specdec trial CA")])
        builder = _begun(self._name, self._key, _now(), DAYS).add_extension(x509.BasicConstraints(True, 0), True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._cert = builder.add_extension(usage, True).issuer_name(self._name).sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """Certificate of the CA itself in PEM, for clients to trust."""
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def issue(self, names: Sequence[str], *, begins: datetime | None = None, days: float = DAYS) -> Issued:
        """Issue a certificate, with a new key, for host names, IP addresses or SPIFFE URIs.

        It is valid for `days` days from `begins` on, by default from an hour ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        builder = _begun(subject, key, begins or _now(), days).issuer_name(self._name)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), False)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        cert = builder.add_extension(own, False).sign(self._key, hashes.SHA256())
        return Issued(cert.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _begun(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, days: float
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(subject_name=subject, public_key=key.public_key())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begins).not_valid_after(begins + timedelta(days=days))


def _now() -> datetime:
    return datetime.now(UTC) - timedelta(hours=1)  # clocks of two machines differ


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
