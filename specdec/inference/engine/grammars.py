"""Compilation of grammars off the event loop: one at a time, with a time limit and a bounded queue."""

from __future__ import annotations

import asyncio

from specdec.inference.engine.threads import Threads
from specdec.inference.errors import CapacityError
from specdec.inference.request import Grammar
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher

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
        self._threads = Threads("grammars", num_threads=1, num_places=MAX_COMPILING)

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar; return a matcher for an output that has no tokens yet.

        Raises:
            InvalidRequestError: the grammar has a fault, or is too complex.
            CapacityError: `MAX_COMPILING` other grammars are waiting or being compiled, or the machine is too busy.
        """
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await self._threads.run(self._compiler.compile, grammar)
        except TimeoutError:
            fault = f"the grammar was not ready after {COMPILE_TIMEOUT_S:g} s"
            message = f"{fault}: other grammars were being compiled before it, or the machine is busy"
            raise CapacityError(message, retry_after_s=_RETRY_AFTER_S) from None
