"""Generation in notebooks and scripts: `LLM` loads models in this process, `Client` asks a server.

`AsyncLLM` and `AsyncClient` are the same for asynchronous code. Settings have the names of the command line's
flags (docs/library.md).
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from tqdm.std import tqdm

from specdec.inference.commit import Delta
from specdec.inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    ConnectionConfig,
    Loading,
    usable_core_ids,
    usable_cores,
)
from specdec.inference.declared import read_given
from specdec.inference.engine.target import EngineLimits
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.observe.host_load import LoadMeter
from specdec.inference.request import SeedScope
from specdec.inference.serving.assembly import target_engine
from specdec.inference.serving.event_loop import new_event_loop
from specdec.inference.serving.models import NO_DRAFT, OneModel, PairSettings, fetched, fused_config
from specdec.inference.settings import group, same
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.prompts import run_prompt
from specdec.inference.workers.completing.results import Comparison, Result
from specdec.inference.workers.completion import Completer, CompletionRequest
from specdec.parameters import (
    ClientSettings,
    FunctionT,
    ModelSettings,
    Parameters,
    Prompt,
    prompt_list,
    prompt_of,
    request_of,
    spelled_out,
)

T = TypeVar("T")
_owner: int | None = None
"""Id of the process that opened the first model or connection; None before that.

A fork of that process has none of its threads, and so cannot use the models and connections that it opened.
"""


def _require_process() -> None:
    global _owner
    _owner = _owner or os.getpid()
    if _owner != os.getpid():
        hint = 'open models in the child alone, or start it by multiprocessing.get_context("spawn")'
        raise ConfigError(f"process {os.getpid()} is a fork of {_owner}, which has opened models already: {hint}")


def _briefly(function: FunctionT) -> FunctionT:
    """Return the function, so that users' mistakes (ConfigError, InvalidRequestError) have a short traceback.

    The traceback then lacks the frames of this library, all of which a notebook would show.
    """

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (ConfigError, InvalidRequestError) as exc:
            raise exc.with_traceback(None) from None

    return call  # type: ignore[return-value]


def _bar(num_prompts: int) -> Any:
    """Return a progress bar, which shows itself only for several prompts, and in a notebook or on a terminal."""
    is_watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(total=num_prompts, unit="prompt", disable=num_prompts < 2 or not is_watched)


def _quiet_bars() -> None:
    """Import the progress bars of huggingface_hub and Transformers without their warning that ipywidgets is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401


@dataclass(frozen=True, slots=True)
class _Alone:
    """Settings of `LLM` if it has a target without a draft."""

    model: OneModel = group(OneModel)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Settings of `Client`: those of its connection, and how many prompts of one call run at once."""

    connection: ConnectionConfig = group(ConnectionConfig)
    batch: int = same(Loading, "num_slots")


class _Async:
    """Base class of `AsyncLLM` and `AsyncClient`.

    A subclass implements `_open`, which loads models or connects, and returns the completer that answers requests.

    Args:
        settings: settings of the subclass.
        concurrency: most prompts of one call of `generate` that run at once.
        name: names of models or servers, which `repr` shows.
    """

    _IS_WHOLE = True
    """Whether this process computes the answers; otherwise servers do."""

    def __init__(self, settings: Any, concurrency: int, name: str) -> None:
        self._settings = settings
        self._name = name
        self._concurrency = concurrency
        self._stack = AsyncExitStack()
        self._completer: Completer | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}{'' if self._completer else ', not open'})"

    async def _open(self, stack: AsyncExitStack) -> Completer:
        raise NotImplementedError

    async def open(self) -> Self:
        """Load models or connect, as entering `async with` does, and return the object itself.

        It is for notebooks, where no `async with` block spans several notebook cells. What is open already stays open.
        """
        _require_process()
        async with AsyncExitStack() as stack:
            self._completer = self._completer or await self._open(stack)
            self._stack.push_async_callback(stack.pop_all().aclose)
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close models and connections; requests that are still running end with an error."""
        self._completer = None
        await self._stack.aclose()

    @spelled_out
    async def generate(self, prompts: Prompt | Sequence[Prompt], **parameters: Unpack[Parameters]) -> list[Result]:
        """Return the results of one prompt or of several, in their order.

        If prompts fail, the failure of the first of these is raised, after all prompts have ended.
        """
        completer, requests = self._requests(prompt_list(prompts), parameters)
        results, places = [Result(each.prompt) for each in requests], asyncio.Semaphore(self._concurrency)
        with _bar(len(requests)) as bar:
            async with asyncio.TaskGroup() as group:
                for result, request in zip(results, requests, strict=True):
                    task = group.create_task(run_prompt(completer, request, places, result))
                    task.add_done_callback(lambda _: bar.update())
        for error in filter(None, (result.error for result in results)):
            raise error
        return results

    @spelled_out
    async def compare(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Comparison:
        """Complete a prompt several times with the draft and several times by the target alone; return the results.

        All runs have the same seed. Results are in pairs, one with the draft and one by the target alone, which run one
        after the other. Before these runs there is one of each kind whose result is not kept.

        Raises:
            ConfigError: `gamma` is given.
        """
        if "gamma" in parameters:
            raise ConfigError("compare sets gamma itself: 0 for the target alone")
        (warm,) = await self.generate(prompt, **parameters)  # first passes build what later ones use
        chosen: Parameters = {**parameters, "seed": warm.seed, "seed_scope": SeedScope.ALL}
        plain: Parameters = {**chosen, "gamma": 0}

        async def run(is_drafted: bool) -> Result:
            (result,) = await self.generate(prompt, **(chosen if is_drafted else plain))
            return result

        await run(False)
        meter = LoadMeter(usable_core_ids(), is_whole=self._IS_WHOLE)
        comparison = await Comparison.of(run)
        comparison.load = meter.read()
        return comparison

    @spelled_out
    async def stream(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> AsyncGenerator[Delta, None]:
        """Yield the parts of one answer as they come, each with the tokens of one pass of the target.

        Closing the iterator ends the request.
        """
        completer, [request] = self._requests([prompt], parameters)
        async with aclosing(completer.complete(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    def _requests(
        self, prompts: Sequence[Prompt], parameters: Mapping[str, Any]
    ) -> tuple[Completer, list[CompletionRequest]]:
        if self._completer is None:
            raise ConfigError(f"this {type(self).__name__} is not open; `async with` or `await open()` opens it")
        template = request_of(parameters)
        return self._completer, [replace(template, prompt=prompt_of(each)) for each in prompts]


class AsyncLLM(_Async):
    """Models loaded into this process, for asynchronous code; see `LLM`."""

    @spelled_out
    def __init__(
        self, target: str | Path | None = None, draft: str | Path | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        if target is not None and not isinstance(target, str | Path):
            raise ConfigError(f"target {target!r} is not a model: a directory or a hub id is expected")
        self._has_draft = draft != NO_DRAFT and (draft is not None or target is None)
        models = {"target_model": target or BUNDLED_TARGET}
        if self._has_draft:
            pair = read_given(PairSettings, {**settings, **models, "draft_model": draft or BUNDLED_DRAFT}, name="LLM")
            super().__init__(pair, pair.models.loading.num_slots, f"{models['target_model']}, {draft or BUNDLED_DRAFT}")
        else:
            alone = read_given(_Alone, {**settings, **models}, name="LLM without a draft")
            super().__init__(alone, alone.model.loading.num_slots, str(target or BUNDLED_TARGET))

    async def _open(self, stack: AsyncExitStack) -> Completer:
        _quiet_bars()
        read = await asyncio.to_thread(fetched, self._settings)
        config = fused_config(read) if self._has_draft else read.model.config(num_threads=usable_cores())
        running = await stack.enter_async_context(target_engine(config, EngineLimits(self._concurrency)))
        return LocalCompleter(running.engine, running.tokenizer)


class AsyncClient(_Async):
    """Connection to servers of one model, for asynchronous code; see `Client`."""

    _IS_WHOLE = False

    @spelled_out
    def __init__(self, target: str = "127.0.0.1", **settings: Unpack[ClientSettings]) -> None:
        read = read_given(_Asking, {**settings, "target_host": target}, name="Client")
        super().__init__(read, read.batch, target)

    async def _open(self, stack: AsyncExitStack) -> Completer:
        fleet = await stack.enter_async_context(connected(self._settings.connection))
        return FailoverCompleter(fleet, self._settings.connection)


class _Blocking:
    """Base class of `LLM` and `Client`: runs their asynchronous twin in an event loop on a thread of its own.

    So they work in a notebook, where an event loop is running already. If nothing else does, garbage collection or the
    interpreter's end closes models and connections.

    Args:
        inner: the asynchronous twin, which is opened here.
    """

    def __init__(self, inner: _Async) -> None:
        _require_process()
        self._inner = inner
        self._loop = new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, inner, self._loop, thread)
        _open_ones.add(self)
        try:
            self._run(inner.__aenter__())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return repr(self._inner).removeprefix("Async")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C

    def _check(self) -> None:
        _require_process()
        if not self.close.alive:
            raise ConfigError(f"this {type(self).__name__} is closed")

    @spelled_out
    @_briefly
    def generate(self, prompts: Prompt | Sequence[Prompt], **parameters: Unpack[Parameters]) -> list[Result]:
        """Return the results of one prompt or of several, in their order.

        If prompts fail, the failure of the first of these is raised, after all prompts have ended.
        """
        self._check()
        return self._run(self._inner.generate(prompts, **parameters))

    @spelled_out
    @_briefly
    def compare(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Comparison:
        """Complete a prompt several times with the draft and several times by the target alone; return the results.

        All runs have the same seed. Results are in pairs, one with the draft and one by the target alone, which run one
        after the other. Before these runs there is one of each kind whose result is not kept.

        Raises:
            ConfigError: `gamma` is given.
        """
        self._check()
        return self._run(self._inner.compare(prompt, **parameters))

    @spelled_out
    def stream(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Generator[Delta, None, None]:
        """Yield the parts of one answer as they come, each with the tokens of one pass of the target.

        Closing the iterator ends the request.
        """
        self._check()
        parts: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(_pump(self._inner.stream(prompt, **parameters), parts), self._loop)
        try:
            while (part := parts.get()) is not None:
                yield part
            future.result()
        finally:
            future.cancel()


class LLM(_Blocking):
    """Models loaded into this process: a target with or without a draft; without arguments the bundled pair.

    Args:
        target, draft: directories or hub ids; the draft may also be "ngram" (prompt lookup), or "none" for no draft. If
            no target is named, it is the bundled one, with the bundled draft unless another is named; a target that
            is named has only the draft that is named.
        settings: values of those flags of `specdec fused_target` that concern models; without a draft, of
            `specdec verify_target`.
    """

    @spelled_out
    @_briefly
    def __init__(
        self, target: str | Path | None = None, draft: str | Path | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        super().__init__(AsyncLLM(target, draft, **settings))


class Client(_Blocking):
    """Connection to the servers of one model.

    Args:
        target: HOST:PORT, or another value of the flag `--target_host`.
        settings: values of the flags of `specdec fused_client` that concern the connection, and of `--batch`.
    """

    @spelled_out
    @_briefly
    def __init__(self, target: str = "127.0.0.1", **settings: Unpack[ClientSettings]) -> None:
        super().__init__(AsyncClient(target, **settings))


_open_ones: weakref.WeakSet[_Blocking] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_open_ones):
        each.close()


# Before the threads of executors end: a pass that runs after Ctrl-C would find none, and log a traceback.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


async def _pump(stream: AsyncGenerator[Delta, None], parts: queue.SimpleQueue[Delta | None]) -> None:
    try:
        async with aclosing(stream):
            async for part in stream:
                parts.put(part)
    finally:
        parts.put(None)


def _close(inner: _Async, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if _owner == os.getpid():
        asyncio.run_coroutine_threadsafe(inner.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
