"""Endpoints: servers that are already running, measured where they are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from specdec.inference.config import PLAIN, DialSecurity
from specdec.inference.errors import ConfigError

_NAME = re.compile(r"[\w.-]+")
_FILES = {"tls_ca": "ca", "tls_client_cert": "cert", "tls_client_key": "key", "token_file": "token_file"}
"""Flags with a file as their value that may differ for one endpoint, with the names of the fields of `DialSecurity`."""
_SERVER_NAME = "tls_server_name"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Server that is already running.

    Attributes:
        name: its name in the report.
        url: grpc://HOST:PORT of a server of this project, or the base URL of an OpenAI-compatible API.
        security: certificates and token for the connection.
    """

    name: str
    url: str
    security: DialSecurity = PLAIN

    def __post_init__(self) -> None:
        fault = _fault(self.name, urlsplit(self.url))
        if fault is not None:
            raise ConfigError(f"endpoint {self.name}: {fault}")
        if not self.url.startswith("https:"):
            shown = self.security
            ca = shown.ca if self.is_grpc else None  # plain HTTP uses no CA, even if one is given
            DialSecurity(ca, token_file=shown.token_file, insecure=shown.insecure).check(self.address)

    @property
    def is_grpc(self) -> bool:
        return self.url.startswith("grpc:")

    @property
    def address(self) -> str:
        """Address as HOST:PORT; if the URL has no port, it is 443 for https and 80 for http."""
        url = urlsplit(self.url)
        return url.netloc if url.port else f"{url.netloc}:{443 if url.scheme == 'https' else 80}"


def _fault(name: str, url: SplitResult) -> str | None:
    """Return what is wrong with an endpoint's name or URL, or None; the text omits a URL that may contain a secret."""
    if not _NAME.fullmatch(name):
        return "a name has letters, digits, '_', '.' and '-'"
    if "@" in url.netloc or url.query or url.fragment:
        return "its URL has more than host, port and path; a token belongs into a file, see token_file"
    try:
        port = url.port
    except ValueError as exc:
        return f"{url.geturl()}: {exc}"
    if url.scheme not in ("grpc", "http", "https") or not url.hostname:
        return f"{url.geturl()!r} is none of grpc://HOST:PORT and http(s)://HOST:PORT/v1"
    if url.scheme == "grpc":
        return None if port and not url.path else f"{url.geturl()} is not grpc://HOST:PORT"
    return None if url.path else f"{url.geturl()} has no path; OpenAI's API is at .../v1"


def endpoint_of(text: str, security: DialSecurity = PLAIN) -> Endpoint:
    """Return the endpoint that NAME=URL[,FLAG=VALUE...] describes.

    Args:
        security: default for flags that the text does not override.

    Raises:
        ConfigError: the text is no such endpoint; the message names it.
    """
    words, *options = text.split(",")
    name, equals, url = words.partition("=")
    if not equals:
        raise ConfigError(f"endpoint {text}: NAME=URL is expected")
    values: dict[str, Any] = {}
    for flag, _, value in (option.partition("=") for option in options):
        if flag not in _FILES and flag != _SERVER_NAME:
            raise ConfigError(f"endpoint {name}: {flag!r} is none of {', '.join([*_FILES, _SERVER_NAME])}")
        values[_FILES.get(flag, "server_name")] = Path(value) if flag in _FILES else value
    return Endpoint(name, url.rstrip("/"), replace(security, **values))
