"""Reasoning before a model's answer, between <think> and </think>: found in prompts, and split off growing outputs."""

from __future__ import annotations

from specdec.inference.text.held import split_held

BEGIN, END = "<think>", "</think>"


def is_begun(prompt: str) -> bool:
    """Return whether a prompt ends with <think>, so that the output begins inside the reasoning."""
    return prompt.rstrip().endswith(BEGIN)


def is_over(prompt: str) -> bool:
    """Return whether a prompt ends with </think>, as chat templates write it if no reasoning is wanted."""
    return prompt.rstrip().endswith(END)


class Reasoning:
    """Splitter of a model's growing output into its reasoning, without the whitespace around it, and the answer.

    Args:
        begun: True if the prompt ends inside a reasoning; otherwise the output has one only if it begins with <think>.
    """

    def __init__(self, *, begun: bool) -> None:
        self._state = self._in_thought if begun else self._at_start
        self._held = ""
        self._is_fresh = True

    def push(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Add a piece of the output; return the text that it adds to the reasoning, and to the answer.

        Text that may be the beginning of <think> or </think> is returned only by a later call, which decides it.

        Args:
            is_last: True if no further piece follows, so that all text is returned.
        """
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
        thought, end, answer = text.partition(END)
        if not end:
            certain, self._held = split_held(text, END)
            return self._stripped(certain), ""
        thought = self._stripped(thought.rstrip())
        self._state, self._is_fresh = self._in_answer, True
        return thought, self._in_answer(answer)[1]

    def _in_answer(self, text: str) -> tuple[str, str]:
        return "", self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text
