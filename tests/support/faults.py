"""Injection of a MemoryError at any line of given modules, and a check that a decoder loses no token by it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from specdec.inference.model.decoder import Decoder, Turn, Verdict


def strikes(call: Callable[[], object], number: int, within: tuple[str, ...]) -> bool:
    """Run `call`, raising a MemoryError before one line; return True if that line was reached and the error not caught.

    Args:
        number: which line, counted from 1 in the order in which lines run, repetitions included.
        within: prefixes of names of modules; lines of other modules are not counted.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not str(frame.f_globals.get("__name__")).startswith(within):
            return None
        left -= event == "line"
        if not left:
            left = -1  # once
            raise MemoryError(f"injected at line {frame.f_lineno} of {frame.f_code.co_filename}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except MemoryError:
        return True
    finally:
        sys.settrace(before)
    return False


def assert_faults_cost_no_token(decoder: Decoder, begun: Callable[[], list[Turn]], within: tuple[str, ...]) -> None:
    """Check that a decoding step that runs out of memory costs no token.

    Four steps are run again and again; in each run the third step fails at another line, and is then repeated. The
    tokens must be those of a run without a failure.

    Args:
        begun: function that returns the first turns (what each sequence asks of a step) of some new sequences.
        within: prefixes of names of modules in whose lines the step fails.
    """
    expected = _after_steps(decoder, begun(), 0, within)
    for number in itertools.count(1):
        token_ids = _after_steps(decoder, begun(), number, within)
        if token_ids is None:
            assert number > 10
            return
        for ours, theirs in zip(token_ids, expected or (), strict=True):
            length = min(len(ours), len(theirs))  # a prompt that is read again may bring fewer tokens than a round
            assert ours[:length] == theirs[:length], f"other tokens after a failure at point {number}"


def _after_steps(
    decoder: Decoder, turns: list[Turn], number: int, within: tuple[str, ...]
) -> list[Sequence[int]] | None:
    """Run four decoding steps; return each sequence's token ids after them, or None if nothing failed as asked.

    The third step fails at line `number` (see `strikes`), and is then repeated; with 0 it does not fail. None means
    that the third step runs fewer lines.
    """
    for step in range(4):
        if step == 2 and number:
            if not strikes(partial(decoder.step, turns), number, within):
                return None
            turns = [replace(turn, start=0) for turn in turns]
        verdicts = decoder.step(turns)
        assert all(verdict.token_ids for verdict in verdicts)
        turns = [_next(turn, verdict) for turn, verdict in zip(turns, verdicts, strict=True)]
    return [turn.token_ids for turn in turns]


def _next(turn: Turn, verdict: Verdict) -> Turn:
    start = len(turn.token_ids) + verdict.num_accepted_tokens
    return replace(turn, start=start, token_ids=[*turn.token_ids, *verdict.token_ids], proposal=verdict.token_ids[:2])
