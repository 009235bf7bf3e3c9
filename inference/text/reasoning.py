"""What a model thinks before it answers, between <think> and </think>: split off, piece by piece. Knows no tokens."""

from __future__ import annotations

from inference.text.held import split_held

BEGIN, END = "<think>", "</think>"


def is_begun(prompt: str) -> bool:
    """Whether the prompt has begun a reasoning, so that the output goes on with it."""
    return prompt.rstrip().endswith(BEGIN)


def is_over(prompt: str) -> bool:
    """Whether the prompt has ended it, as templates do where no thinking is wanted."""
    return prompt.rstrip().endswith(END)


class Reasoning:
    """Splits a growing output into its reasoning and the rest, without the whitespace around the former.

    Args:
        begun: the output goes on with a reasoning that the prompt has begun; else it has one if it begins so.
    """

    def __init__(self, *, begun: bool) -> None:
        self._state = self._in_thought if begun else self._at_start
        self._held = ""
        self._is_fresh = True

    def push(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """What became certain: of the reasoning, and of the rest; with the last text, all."""
        text, self._held = self._held + text, ""
        thought, rest = self._state(text)
        if not is_last:
            return thought, rest
        return (thought, rest + self._held) if self._state == self._at_start else (thought + self._held.rstrip(), rest)

    def _at_start(self, text: str) -> tuple[str, str]:
        begun = text.lstrip()
        if BEGIN.startswith(begun):
            self._held = text
            return "", ""
        if begun.startswith(BEGIN):
            self._state = self._in_thought
            return self._in_thought(begun.removeprefix(BEGIN))
        self._state, self._is_fresh = self._in_answer, False
        return "", text

    def _in_thought(self, text: str) -> tuple[str, str]:
        thought, end, behind = text.partition(END)
        if not end:
            certain, self._held = split_held(text, END)
            return self._stripped(certain), ""
        thought = self._stripped(thought.rstrip())
        self._state, self._is_fresh = self._in_answer, True
        return thought, self._in_answer(behind)[1]

    def _in_answer(self, text: str) -> tuple[str, str]:
        return "", self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text
