"""The mailbox: a socket between our server or pool (the front) and vLLM's engine cores; access, bad messages, ends."""

from __future__ import annotations

import asyncio
import random
import socket
import stat
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from msgspec import structs

from specdec.inference.engine.pool import DraftPool
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm import mailbox as module
from specdec.inference.vllm.drafts import Drafts
from specdec.inference.vllm.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    VERSION,
    FrameError,
    FromCore,
    Gone,
    Grow,
    Has,
    Hello,
    Help,
    Served,
    ToCore,
    Wanted,
    from_core,
    packed,
    to_core,
)
from specdec.inference.vllm.group import members
from specdec.inference.vllm.lending import LendingEngine
from specdec.inference.vllm.link import Link, Place
from specdec.inference.vllm.mailbox import Mailbox, require_private
from specdec.inference.vllm.translation import SOCKET
from tests.support.scripted import until

HELLO = Hello(VERSION, "model")
SERVED = Served("model", b"a tokenizer", [1], 300, 128, 4)


@pytest.fixture
async def mailbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Mailbox, None]:
    mailbox = Mailbox(tmp_path_factory.mktemp("mailbox"), "model")
    await mailbox.open()
    yield mailbox
    await mailbox.close()


async def test_the_socket_is_for_its_user_alone(mailbox: Mailbox) -> None:
    assert stat.S_IMODE(mailbox.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(mailbox.path.parent.stat().st_mode) == 0o700
    await mailbox.close()
    assert not mailbox.path.exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(MAX_FRAME_BYTES + 1),
        LENGTH.pack(0),
        packed(Has("a request before the greeting")),
        packed(Hello(VERSION + 1, "model")),
        packed(Hello(VERSION, "another model")),
        packed(Hello(VERSION, "model")) + LENGTH.pack(8) + b"garbage!",
        packed(Hello(VERSION, "model")) + packed(Help("meant for a core", 1)),
        b"",
    ],
)
async def test_garbage_closes_its_own_link_alone(mailbox: Mailbox, sent: bytes) -> None:
    received: list[FromCore | None] = []
    mailbox.receive = lambda core, frame: received.append(frame) if core == 0 else None
    core = Link(Place(str(mailbox.path), "model"), lambda frame: None, list)
    try:
        reader, writer = await asyncio.open_unix_connection(mailbox.path)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        core.send(Has("a request"))
        await until(lambda: received == [Has("a request")])
        assert mailbox.is_linked(0)
        assert not mailbox.is_linked(1)
    finally:
        core.close()


@pytest.mark.parametrize("read", [from_core, to_core])
def test_no_bytes_raise_anything_else(read: object) -> None:
    chance = random.Random(1)
    whole = [packed(frame)[LENGTH.size :] for frame in (HELLO, Has("a"), Grow("a", [Branch(None, 3, [1, 2])]))]
    for _ in range(3000):
        body = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        try:
            read(bytes(body[: chance.randrange(len(body) + 1)]))  # type: ignore[operator]
        except FrameError:
            continue


async def test_a_core_of_its_own_dials_again_and_names_its_requests(tmp_path: Path) -> None:
    """An engine core of `vllm serve` connects to each new pool of draft workers, and names its running requests.

    When a pool ends, the core drops the draft tokens that came from the pool.
    """
    first = Mailbox(tmp_path, "model")
    await first.open()
    received: list[ToCore | None] = []
    core = Link(Place(str(first.path), "model", owned=False), received.append, lambda: [Has("a"), Has("b")])
    try:
        await first.until_linked(1)
        first.send(0, Help("a", 1))
        await until(lambda: received == [Help("a", 1)])
        await first.close()
        await until(lambda: received[1:] == [None])
        second, named = Mailbox(tmp_path, "model"), []
        second.receive = lambda core, frame: named.append(frame)
        await second.open()
        await until(lambda: len(named) == 2)
        assert named == [Has("a"), Has("b")]
        await second.close()
    finally:
        core.close()


async def test_a_core_of_its_own_never_waits_for_its_pool(tmp_path: Path) -> None:
    """An engine core of `vllm serve` never waits for a pool of draft workers that does not read its messages.

    Regression: such a pool delayed each pass of the core for seconds, and then the connection was lost.
    """
    pool, received = Mailbox(tmp_path), []
    pool.receive = lambda core, frame: received.append(frame)
    await pool.open()
    long = Has("a", Wanted(list(range(10_000)), 1, 1, 1, {}))
    core = Link(Place(str(pool.path), owned=False).of_pool(SERVED), lambda frame: None, list)

    def sent_and_read(number: int) -> bool:
        core.send(Gone("a"))
        return bool(received) and received.count(long) == number

    try:
        await until(lambda: sent_and_read(0))  # the pool may know of the link before the core does
        for _ in range(100):  # the loop that would read stands still meanwhile
            core.send(long)
        await until(lambda: sent_and_read(100))
        assert None not in received
    finally:
        core.close()
        await pool.close()


async def test_cores_of_several_servers_share_a_pool_if_their_tokens_are_the_same(tmp_path: Path) -> None:
    pool = Mailbox(tmp_path)
    await pool.open()
    place = Place(str(pool.path), owned=False)
    others = place.of_pool(structs.replace(SERVED, vocab_size=301))
    cores = [Link(place.of_pool(SERVED), lambda frame: None, list) for _ in range(2)]
    try:
        await pool.until_linked(2)
        reader, writer = await asyncio.open_unix_connection(pool.path)
        writer.write(packed(Hello(VERSION, others.model_id)))
        assert await reader.read() == b""
        writer.close()
        assert pool.num_links == 2
        with pytest.raises(ConfigError, match="another pool"):
            await Mailbox(tmp_path).open()
    finally:
        for core in cores:
            core.close()
        await pool.close()


def test_a_mailbox_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        require_private(tmp_path)


async def reach(mailbox: Mailbox) -> None:
    """Connect to the mailbox's socket and send nothing; wait until the mailbox has closed the connection."""
    reader, writer = await asyncio.open_unix_connection(mailbox.path)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_a_second_pool_leaves_the_first_one_its_socket(tmp_path: Path) -> None:
    """A pool of draft workers that cannot have a mailbox, because another pool has it, removes nothing there.

    Regression: it removed the first pool's socket, so that no core found that pool any more and a third could start.
    """
    first = Mailbox(tmp_path)
    await first.open()
    for _ in range(2):
        second = Mailbox(tmp_path)
        with pytest.raises(ConfigError, match="another pool has the mailbox"):
            await second.open()
        await second.close()
    await reach(first)
    await first.close()
    assert not first.path.exists()
    third = Mailbox(tmp_path)
    await third.open()
    await third.close()


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted([5, 300], 1, 5, 4, {}),
        Wanted([2**40], 0, 5, 4, {}),
        Wanted([5], 1, 5, 4, {"logit_bias": [[300, 1.0]]}),
        Wanted([5], 2**40, 5, 4, {}),
        Wanted([], 0, 5, 4, {}),
    ],
    ids=["unknown token", "no token id", "unknown biased token", "output before its prompt", "no token"],
)
async def test_a_request_that_cannot_be_closes_its_link(mailbox: Mailbox, wanted: Wanted) -> None:
    """An engine core that names an impossible request, such as one of unknown token ids, loses its connection.

    Regression: unknown token ids were accepted, and the task that drafted for the request ended without a message.
    """
    mailbox.hello = structs.replace(HELLO, served=SERVED)
    engine = LendingEngine(mailbox)
    await engine.served()
    engine.lend(DraftPool(engine), Metrics("m", role="pool"))
    with pytest.raises(FrameError, match="request a cannot be"):
        engine.receive(0, Has("a", wanted))


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
async def test_a_pool_removes_nothing_that_it_has_not_made(tmp_path: Path, kind: str) -> None:
    """If something that is no socket has the socket's name, the pool's error names it, and the pool leaves it there.

    Regression: the pool removed it, and if it was a folder, ended with another error.
    """
    mailbox = Mailbox(tmp_path)
    if kind == "folder":
        mailbox.path.mkdir()
    elif kind == "file":
        mailbox.path.write_text("kept")
    else:
        mailbox.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no socket can be made at"):
        await mailbox.open()
    await mailbox.close()
    assert names_in(tmp_path) == [mailbox.path.name]


async def test_the_socket_of_a_killed_pool_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / SOCKET))
    mailbox = Mailbox(tmp_path)
    await mailbox.open()
    await reach(mailbox)
    await mailbox.close()


async def test_a_link_without_a_greeting_is_closed(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which no greeting comes, or only half of one, is closed after a time.

    Regression: such a connection stayed open for ever.
    """
    monkeypatch.setattr(module, "HELLO_S", 0.1)
    reader, writer = await asyncio.open_unix_connection(mailbox.path)
    writer.write(packed(HELLO)[:-1])
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


OWNED = """
import os, sys, time
from specdec.inference.vllm.group import members
from specdec.inference.vllm.link import Link, Place
child = os.fork() or time.sleep(600)
print(child, flush=True)
Link(Place(sys.argv[1], "model", group=os.getpgrp()), lambda frame: None, list)
time.sleep(600)
"""


async def test_a_core_ends_with_its_front_and_so_does_its_group(mailbox: Mailbox) -> None:
    """An engine core ends with the server (front) that started it, together with the other processes of its group.

    Regression: after a front was killed, its core and coordinator ran on, and kept the memory of their
    devices.
    """
    core = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNED, mailbox.path), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert core.stdout is not None
    child = int(await core.stdout.readline())
    await mailbox.until_linked(1)
    await mailbox.close()
    assert await asyncio.wait_for(core.wait(), 60) == 1
    assert child not in members(core.pid)


def test_late_and_wrong_draft_tokens_change_no_proposal() -> None:
    drafts = Drafts()
    drafts.enter("a", [1, 2, 3], gamma=4)
    ready = {"a": 9}
    drafts.receive(Grow("a", [Branch(None, 3, [4, 5])]))  # no draft worker helps
    assert drafts.proposals(ready, may_wait=False) == [[]]
    drafts.receive(Help("a", 1))
    drafts.receive(Grow("a", [Branch(None, 3, [4, 5, 6, 7, 8])]))
    assert drafts.proposals(ready, may_wait=False) == [[4, 5, 6, 7]]
    row = drafts.passed("a", [4, 9], [4, 5, 6, 7], 1)
    assert (row.num_tokens, row.num_drafts, row.num_accepted, row.rejected) == (2, 4, 1, [5, 6, 7])
    assert (row.help, row.num_received) == (1, 5)
    with pytest.raises(InvalidRequestError):  # the front refuses such a branch before
        drafts.receive(Grow("a", [Branch(77, 0, [1])]))
    drafts.receive(Help("unknown", 1))


def test_tokens_are_looked_up_where_no_worker_has_any() -> None:
    drafts, tokens = Drafts(looks_up=True), [1, 2, 3] * 5
    drafts.enter("a", tokens, gamma=4)
    assert drafts.proposals({"a": 0}, may_wait=True) == [[]]
    (proposal,) = drafts.proposals({"a": 9}, may_wait=True)
    assert proposal == [1, 2, 3, 1][: len(proposal)] != []
    row = drafts.passed("a", [1, 7], proposal, 1)
    assert (row.is_lookup, row.num_drafts, row.num_accepted) == (True, len(proposal), 1)
    drafts.receive(Help("a", 1))
    drafts.receive(Grow("a", [Branch(None, len(tokens) + 2, [4, 5])]))
    assert drafts.proposals({"a": 9}, may_wait=True) == [[4, 5]]
