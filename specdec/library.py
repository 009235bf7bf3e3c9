"""Generation without a server, for notebooks and scripts: `LLM` loads models, `Client` asks a server.

`AsyncLLM` and `AsyncClient` are the same for asynchronous code. Settings have the names of flags (docs/library.md).
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from inference.cli.app import new_event_loop, prepared
from inference.cli.prompts.results import Result
from inference.cli.prompts.source import PromptJob
from inference.cli.prompts.topologies import run_prompt
from inference.cli.roles.fused_target import fused_config
from inference.cli.roles.registry import settings_by_name
from inference.commit import Delta
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ObserveConfig, usable_cores
from inference.errors import ConfigError
from inference.request import SamplingParams
from inference.serving.assembly import target_engine
from inference.text.chat import Chat
from inference.text.structured import the_grammar
from inference.workers.completion import Completer, CompletionRequest
from inference.workers.failover import FailoverCompleter
from inference.workers.fleet import connected
from inference.workers.local import LocalCompleter

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat with "role" and "content"."""
_SAMPLING = {each.name for each in fields(SamplingParams)} - {"seed"}
_OURS = {"prompt", "sampling", "unsaid", "resume", "deadline", "grammar"}
_REQUEST = {each.name for each in fields(CompletionRequest)} - _OURS
_owner: int | None = None
"""Process that opened the first model or connection. A fork of it has the locks of its threads, but no threads."""


def _require_process() -> None:
    global _owner
    _owner = _owner or os.getpid()
    if _owner != os.getpid():
        hint = 'open models in the child alone, or start it by multiprocessing.get_context("spawn")'
        raise ConfigError(f"process {os.getpid()} is a fork of {_owner}, which has opened models already: {hint}")


class _Async:
    """Base of the asynchronous classes; `_open` of a subclass makes the completer."""

    def __init__(self, settings: Any, concurrency: int) -> None:
        self._settings = settings
        self._concurrency = concurrency
        self._stack = AsyncExitStack()
        self._completer: Completer | None = None

    async def _open(self, stack: AsyncExitStack) -> Completer:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        _require_process()
        async with AsyncExitStack() as stack:
            self._completer = await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close models and connections; requests that run fail."""
        self._completer = None
        await self._stack.aclose()

    async def generate(self, prompts: Prompt | Sequence[Prompt], **parameters: Any) -> list[Result]:
        """Return the results of one prompt or of several, in their order; raise the first failure after all ended."""
        completer, job = self._job(_several(prompts), parameters)
        results, places = [Result(prompt) for prompt in job.prompts], asyncio.Semaphore(job.concurrency)
        async with asyncio.TaskGroup() as group:
            for result in results:
                group.create_task(run_prompt(completer, job, places, result, asyncio.Queue()))
        for error in filter(None, (result.error for result in results)):
            raise error
        return results

    async def stream(self, prompt: Prompt, **parameters: Any) -> AsyncGenerator[Delta, None]:
        """Yield the parts of one answer as they come; closing the iterator ends the request."""
        completer, job = self._job([prompt], parameters)
        async with aclosing(completer.complete(replace(job.template, prompt=job.prompts[0]))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    def _job(self, prompts: Sequence[Prompt], parameters: Mapping[str, Any]) -> tuple[Completer, PromptJob]:
        if self._completer is None:
            raise ConfigError(f"this {type(self).__name__} is not open; `async with` opens it")
        read, observe = tuple(map(_prompt, prompts)), ObserveConfig("library")
        return self._completer, PromptJob(read, _request(parameters), self._concurrency, "text", observe)


class AsyncLLM(_Async):
    """Models of this process: a target with a draft, or alone. See `LLM`."""

    def __init__(self, target: str | Path | None = None, draft: str | Path | None = None, **settings: Any) -> None:
        self._has_draft = draft is not None or target is None
        pair = {"draft_model": draft or BUNDLED_DRAFT} if self._has_draft else {}
        role = "fused_target" if self._has_draft else "verify_target"
        read = settings_by_name(role, {**settings, "target_model": target or BUNDLED_TARGET, **pair})
        super().__init__(read, (read.models if self._has_draft else read.model).loading.num_slots)

    async def _open(self, stack: AsyncExitStack) -> Completer:
        read = await asyncio.to_thread(prepared, self._settings)
        config = fused_config(read) if self._has_draft else read.model.config(num_threads=usable_cores())
        running = await stack.enter_async_context(target_engine(config, max_waiting=self._concurrency))
        return LocalCompleter(running.engine, running.tokenizer)


class AsyncClient(_Async):
    """Connection to servers of one model. See `Client`."""

    def __init__(self, target: str = "127.0.0.1", **settings: Any) -> None:
        read = settings_by_name("fused_client", {**settings, "target_host": target})
        super().__init__(read, read.batch)

    async def _open(self, stack: AsyncExitStack) -> Completer:
        fleet = await stack.enter_async_context(connected(self._settings.connection))
        return FailoverCompleter(fleet, self._settings.connection)


class _Blocking:
    """Base of the blocking classes: an asynchronous one in an event loop on a thread of its own, so that it works in a
    notebook, where an event loop runs already. The end of the object, or of the interpreter, closes it, too."""

    def __init__(self, inner: _Async) -> None:
        _require_process()
        self._inner = inner
        self._loop = new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, inner, self._loop, thread)
        try:
            self._run(inner.__aenter__())
        except BaseException:
            self.close()
            raise

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

    def generate(self, prompts: Prompt | Sequence[Prompt], **parameters: Any) -> list[Result]:
        """Return the results of one prompt or of several, in their order; raise the first failure after all ended."""
        self._check()
        return self._run(self._inner.generate(prompts, **parameters))

    def stream(self, prompt: Prompt, **parameters: Any) -> Generator[Delta, None, None]:
        """Yield the parts of one answer as they come; closing the iterator ends the request."""
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
    """Models of this process: a target with a draft, or alone; by default the bundled pair.

    Args:
        target, draft: directories or hub ids; the draft may be "ngram".
        settings: flags of `specdec fused_target`, or of `specdec verify_target` without a draft.
    """

    def __init__(self, target: str | Path | None = None, draft: str | Path | None = None, **settings: Any) -> None:
        super().__init__(AsyncLLM(target, draft, **settings))


class Client(_Blocking):
    """Connection to servers of one model; the target is HOST:PORT, or what else `--target_host` takes, and settings are
    flags of `specdec fused_client`."""

    def __init__(self, target: str = "127.0.0.1", **settings: Any) -> None:
        super().__init__(AsyncClient(target, **settings))


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


def _several(prompts: Any) -> Sequence[Prompt]:
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    return [prompts] if is_one else list(prompts)


def _prompt(prompt: Any) -> str | tuple[int, ...] | Chat:
    if prompt and isinstance(prompt[0], Mapping):
        return Chat.read(prompt)
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _request(parameters: Mapping[str, Any]) -> CompletionRequest:
    """Return the request that parameters describe, without its prompt; raise ConfigError for an unknown name."""
    values = {**parameters, "logit_bias": tuple(dict(parameters.get("logit_bias", ())).items())}
    sampling = SamplingParams(**{name: values.pop(name) for name in _SAMPLING & values.keys()})
    _, grammar = the_grammar({"structured_outputs": values.pop("structured_outputs", None)})
    if unknown := values.keys() - _REQUEST:
        known = ", ".join(sorted({*_SAMPLING, *_REQUEST, "structured_outputs"}))
        raise ConfigError(f"no parameter is called {min(unknown)}; there are {known}")
    stop, ends = values.pop("stop", ()), frozenset(values.pop("stop_token_ids", ()))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return CompletionRequest("", sampling, stop=stops, stop_token_ids=ends, grammar=grammar, **values)
