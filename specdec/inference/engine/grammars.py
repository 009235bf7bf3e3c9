"""Compilation of grammars on threads, for which requests queue; a new grammar is tried out first, one at a time.

A trial compiles the grammar in another process, with limits of time and memory (inference/text/grammar_trial.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from specdec.inference.engine.threads import Threads
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import Grammar
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Default of the most requests that compile a grammar or wait for one; a target sets its own limit."""
MAX_KNOWN = 64
"""Most grammars whose trials are remembered; a grammar has at most 262,144 characters."""
_Trial = asyncio.Future[InvalidRequestError | None]


class Grammars:
    """Compilation of the grammars of one model's requests: trials of new ones on one thread, known ones on another.

    A trial compiles in a process with limits, and takes up to seconds; compiling a known grammar takes a millisecond or
    so. If several requests have the same new grammar, it is tried once, as soon as the first of these requests gets a
    thread; the clients' accounts take turns for it. All calls come from one event loop.

    Args:
        compiler: compiler for the model's tokenizer.
        num_places: most requests that one thread works for or has in its queue.

    Attributes:
        source: function from a `Grammar` to its text in the format of the compiler's library.
    """

    def __init__(self, compiler: GrammarCompiler, num_places: int = MAX_WAITING) -> None:
        self._compiler, self.source = compiler, compiler.source
        self._known: dict[Grammar, _Trial] = {}
        self._trials = Threads("new grammars", num_threads=1, num_places=num_places)
        self._others = Threads("grammars", num_threads=1, num_places=num_places)

    async def warm_up(self) -> None:
        """Prepare the compiler's tables that all grammars share, so that no request waits for them; only log errors."""
        try:
            await self._trials.run(self._compiler.warm_up)
        except Exception:  # of a tokenizer that the library cannot read; all else is served
            logger.exception("this tokenizer allows no structured output")

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar; return a matcher for an output that has no tokens yet.

        Raises:
            InvalidRequestError: the grammar has a fault, or is too complex.
            CapacityError: too many requests wait already, or the compilation was ended early since another client's
                request waits.
        """
        trial = self._known.get(grammar) or self._remember(grammar)
        if not trial.done() and (matcher := await self._tried(grammar, trial)) is not None:
            return matcher
        if (fault := trial.result()) is not None:
            raise InvalidRequestError(fault.message, field=fault.field)
        return await self._others.run(self._compiler.compile, grammar, self._others.is_awaited)

    def _remember(self, grammar: Grammar) -> _Trial:
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]  # who waits for it has a place of its own
        return self._known.setdefault(grammar, asyncio.get_running_loop().create_future())

    async def _tried(self, grammar: Grammar, trial: _Trial) -> GrammarMatcher | None:
        """Try a grammar out once this request gets the thread for it; give up if another request's trial ends sooner.

        Args:
            grammar: the grammar.
            trial: outcome of the first trial of this grammar, for which all requests with the grammar wait.

        Returns:
            The matcher that this trial made; None if another request's trial ended first, or if this one found a fault
            in the grammar. In both cases `trial` has its result.
        """
        work = self._trials.run(self._compiler.compile, grammar, self._trials.is_awaited)
        turn = asyncio.ensure_future(work)
        first: list[asyncio.Future[Any]] = [trial, turn]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.add_done_callback(lambda each: each.cancelled() or each.exception())  # read, for asyncio
            turn.cancel()
        if trial.done():
            return None
        try:
            matcher = turn.result()
        except InvalidRequestError as exc:
            trial.set_result(exc)
            return None
        trial.set_result(None)
        return matcher
