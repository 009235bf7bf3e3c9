"""Compilation of grammars off the event loop: one at a time, with a time limit and a bounded queue."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from inference.errors import CapacityError
from inference.request import Grammar
from inference.text.grammar import GrammarCompiler, GrammarMatcher

COMPILE_TIMEOUT_S = 10.0
"""Seconds that a request waits for its grammar. The compiler's own limits are counted in work and in CPU time, so only
a busy machine exceeds this."""
MAX_COMPILING = 16
_RETRY_AFTER_S = 0.5


class Grammars:
    """Compilation of grammars on one thread of its own, one at a time, for the requests of one model.

    All calls must come from the same event loop.

    Args:
        compiler: compiler for the model's tokenizer.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._num_compiling = 0

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar; return a matcher for an output that has no tokens yet.

        Raises:
            InvalidRequestError: the grammar has a fault, or is too complex.
            CapacityError: `MAX_COMPILING` others are being compiled, or the machine is too busy.
        """
        if self._num_compiling >= MAX_COMPILING:
            raise self._busy(f"the limit is {MAX_COMPILING}")
        compiling = self._thread.submit(self._compiler.compile, grammar)
        work = asyncio.wrap_future(compiling)
        self._num_compiling += 1
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await asyncio.shield(work)  # a thread cannot be stopped: it holds its place until it is done
        except TimeoutError:
            compiling.cancel()  # has an effect on one that has not begun
            raise self._busy(f"this one was not ready after {COMPILE_TIMEOUT_S:g} s") from None

    def _busy(self, why: str) -> CapacityError:
        message = f"{self._num_compiling} grammars are being compiled, {why}"
        return CapacityError(message, retry_after_s=_RETRY_AFTER_S)

    def _done(self, work: asyncio.Future[GrammarMatcher]) -> None:
        self._num_compiling -= 1
        if not work.cancelled():
            work.exception()  # read here, since the request that waited for it may have ended
