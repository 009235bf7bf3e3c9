"""--endpoint: what is taken, and what is refused before anything is dialled."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparison.plan.endpoint import endpoint_of
from inference.config import DialSecurity
from inference.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "is_grpc"),
    [
        ("a=grpc://10.0.0.1:50051", "10.0.0.1:50051", True),
        ("vllm-1=http://localhost:8000/v1/", "localhost:8000", False),
        ("b=https://example.org/api/v1", "example.org:443", False),
        ("c=grpc://[::1]:7", "[::1]:7", True),
    ],
)
def test_endpoints(text: str, address: str, is_grpc: bool) -> None:
    endpoint = endpoint_of(text, DialSecurity(insecure=True))
    assert (endpoint.address, endpoint.is_grpc, endpoint.url[-1] != "/") == (address, is_grpc, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpc://host:1", "NAME=URL is expected"),
        ("a b=grpc://host:1", "endpoint a b: a name has letters"),
        ("a=grpc://host", "grpc://host is not grpc://HOST:PORT"),
        ("a=grpc://host:1/v1", "is not grpc://HOST:PORT"),
        ("a=ftp://host:1/v1", "'ftp://host:1/v1' is none of grpc://HOST:PORT and http(s)"),
        ("a=http://host:8000", "has no path; OpenAI's API is at .../v1"),
        ("a=http://host:99999/v1", "Port out of range"),
        ("a=http://host:1/v1,tls=x", "endpoint a: 'tls' is none of tls_ca"),
        ("a=http://host:1/v1,token_file=x", "the token, prompts and answers would go to host in plain text"),
        ("a=grpc://host:1", "prompts and answers would go to host in plain text"),
        ("a=grpc://host:1,tls_server_name=x", "--tls_server_name without --tls_ca"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        endpoint_of(text)
    assert message in str(error.value)


def test_a_secret_in_a_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="a token belongs into a file") as error:
        endpoint_of("a=https://user:geheim@host/v1")
    assert "geheim" not in str(error.value)


def test_an_endpoint_may_have_its_own_security() -> None:
    common = DialSecurity(ca=Path("ours.pem"), token_file=Path("ours.token"))
    text = "a=grpc://host:1,tls_client_key=k,tls_client_cert=c,tls_ca=theirs.pem"
    found = endpoint_of(text, common).security
    assert found == DialSecurity(Path("theirs.pem"), Path("c"), Path("k"), token_file=Path("ours.token"))
    assert endpoint_of("b=grpc://host:1", common).security == common
