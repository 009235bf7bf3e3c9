"""Text offsets of tokens in answers of /v1/completions, streamed and whole."""

from __future__ import annotations

from specdec.inference.commit import TokenLogprobs
from specdec.inference.gateway.answers.formats import CompletionFormat, text_logprobs
from specdec.inference.gateway.answers.parts import Choice, Part

TOKENS = ("one", " t", "wo", " three")
HELD_BACK = ("one", "", "", " two three")
"""Texts that a stream sends for its tokens if " two!" is a stop string, whose beginnings wait to be sent."""


def test_offsets_are_those_of_tokens_whatever_is_held_back() -> None:
    """A token's offset is its position in the whole text, also if part of the text is not sent yet.

    Regression: a chunk's offset was the length of the text sent before, so streamed answers had other offsets than
    whole ones.
    """
    positions = [TokenLogprobs((7,), (-0.5,), (token.encode(),), len(token)) for token in TOKENS]
    choice, answer = Choice(), CompletionFormat("tiny")
    chunks = [
        answer.chunk(0, Part(text, (False,), (position,)), choice)
        for text, position in zip(HELD_BACK, positions, strict=True)
    ]
    offsets = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
    assert offsets == text_logprobs(positions, 0)["text_offset"] == [0, 3, 5, 7]
