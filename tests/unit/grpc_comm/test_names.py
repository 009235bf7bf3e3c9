"""A client follows a file that lists its servers; after it has read a list, it ignores an invalid file for a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from specdec.grpc_comm import names
from specdec.grpc_comm.channel import UnreachableError
from specdec.grpc_comm.names import Addresses, addresses_of
from specdec.inference.config import ConnectionConfig, DialSecurity, targets
from specdec.inference.errors import ConfigError


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "LOOK_S", 0.01)


def put(path: Path, *lines: str) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(path)


async def said(found: AsyncGenerator[Addresses, None]) -> list[str]:
    return list(await anext(found))


async def test_changes_of_a_file_of_addresses_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "targets"
    put(path, "# ours", "", "a:1", " [::1]:2 ")
    async with aclosing(addresses_of(["z:9", f"file://{path}"])) as found:
        assert await said(found) == ["z:9", "a:1", "[::1]:2"]
        put(path, "b:1")
        assert await said(found) == ["z:9", "b:1"]


@pytest.mark.parametrize("lines", [[], ["# none"], ["a"], ["a:b"], ["a:0"], ["a:65536"], ["dns:///a:1"], [":1"]])
async def test_an_invalid_list_is_an_error_at_first(tmp_path: Path, lines: Sequence[str]) -> None:
    """An invalid list of servers is an error at the client's start.

    Later an empty file counts as one that is being written, and the client keeps its servers.
    """
    path = tmp_path / "targets"
    put(path, "a:1")
    async with aclosing(addresses_of([f"file://{path}"])) as found:
        assert await said(found) == ["a:1"]
        put(path, *lines)
        with pytest.raises(UnreachableError, match=str(path)):
            await anext(addresses_of([f"file://{path}"]))
        path.unlink()
        put(path, "b:1")
        assert await said(found) == ["b:1"]


async def test_names_beside_a_list_are_asked_no_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolved(target: str) -> Addresses:
        asked.append(target)
        return {"c:1": "c"}

    monkeypatch.setattr(names, "_addresses", resolved)
    path = tmp_path / "targets"
    put(path, "a:1")
    async with aclosing(addresses_of([f"file://{path}", "dns:///c:1"])) as found:
        await said(found)
        put(path, "b:1")
        assert await said(found) == ["b:1", "c:1"]
    assert asked == ["dns:///c:1"]


def test_a_file_list_names_servers() -> None:
    assert targets("a:1,file:///etc/targets") == ("a:1", "file:///etc/targets")
    for wrong in ("file://etc/targets:1", "file:/etc/targets"):
        with pytest.raises(ConfigError, match="or file:///PATH"):
            targets(wrong)


def test_a_token_needs_encryption_or_an_insecure_flag(tmp_path: Path) -> None:
    """A token needs encryption or a flag that allows plain text, even for a list of servers.

    The hosts that the list will have are unknown when flags are read.
    """
    security = DialSecurity(token_file=tmp_path / "token")
    with pytest.raises(ConfigError, match="would go to file:///etc/targets in plain text"):
        ConnectionConfig("file:///etc/targets", 1, security=security)
