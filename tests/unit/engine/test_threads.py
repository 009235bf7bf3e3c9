"""Work before a request gets a slot, such as compiling grammars, has a bounded number of threads for all accounts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from specdec.inference.caller import Caller, request_context
from specdec.inference.engine.threads import Threads
from specdec.inference.errors import CapacityError
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.chat import Chat
from specdec.inference.workers.completing.prompt import MAX_INLINE_CHARACTERS, MAX_INLINE_IDS, LocalCodec
from tests.support.grammars import TOKENIZER, grammars
from tests.support.models import DEFAULT_VOCAB_SIZE
from tests.support.scripted import TIMEOUT_S, until


async def asked(account: str, work: Callable[[], Awaitable[object]]) -> object:
    with request_context(Caller(account), "id"):
        return await work()


LONG = "x" * (MAX_INLINE_CHARACTERS + 1)


@pytest.mark.parametrize("kind", ["grammar", "long text", "long chat", "many ids"])
async def test_a_flood_of_one_account_starves_no_other(kind: str) -> None:
    """Work that would stop the event loop runs in threads, and one account cannot occupy all of them.

    Regression: a prompt of 7 MB, refused in the end, stopped every stream of the server for seven seconds,
    and 260,000 ids, sent in 1 kB of gzip, delayed all requests by 50 to 80 ms. A caller with `in_flight = 1` had 17
    grammars compiled at once, and all grammars of another account were refused.
    """
    compiling, codec = grammars(), LocalCodec(TOKENIZER, vocab_size=DEFAULT_VOCAB_SIZE, max_length=128)
    works: dict[str, Callable[[], Awaitable[object]]] = {
        "grammar": lambda: compiling.matcher(Grammar(GrammarKind.CHOICE, '["yes", "no"]')),
        "long text": lambda: codec.encode(LONG),
        "long chat": lambda: codec.encode(Chat.of(("user", LONG))),
        "many ids": lambda: codec.decode([40] * (MAX_INLINE_IDS + 1)),
    }
    flood = list[asyncio.Task[bool]]()

    async def is_taken() -> bool:
        with suppress(CapacityError):
            return bool(await asked("mallory", works[kind]))
        return False

    for _ in range(8):
        flood += [asyncio.create_task(is_taken()) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asked("alice", works[kind])
    assert {*await asyncio.gather(*flood)} == {True, False}


async def test_the_account_with_fewest_in_the_works_goes_first() -> None:
    """A free thread takes a job of the account with the fewest running jobs; cancelled jobs are skipped."""
    threads, let, order = Threads("letters", num_threads=1, num_places=9), threading.Event(), list[str]()

    def work(name: str) -> str:
        order.append(name)
        assert let.wait(TIMEOUT_S)
        return name.upper()

    tasks: dict[str, asyncio.Task[object]] = {}
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        tasks[name] = asyncio.create_task(asked(name[0], lambda name=name: threads.run(work, name)))  # type: ignore[misc]
    await until(lambda: order == ["a0"])
    for name in ("a0", "a2"):
        tasks.pop(name).cancel()
    await asyncio.sleep(0.05)
    assert order == ["a0"]
    let.set()
    assert await asyncio.gather(*tasks.values()) == [name.upper() for name in tasks]
    assert order == ["a0", "b0", "c0", "a1", "b1", "a3"]


async def test_without_accounts_the_latest_is_refused_where_all_places_are_taken() -> None:
    threads, let = Threads("letters", num_threads=1, num_places=3), threading.Event()
    waiting = [asyncio.create_task(threads.run(let.wait, TIMEOUT_S)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="all 1 threads for letters are busy and 2 requests wait already"):
        await threads.run(let.wait)
    let.set()
    assert await asyncio.gather(*waiting) == [True] * 3
