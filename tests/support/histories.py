"""Random histories of a backend's passes over known texts, and checksums of the logits at all positions.

A pass reads the tokens of a given text instead of tokens that the model chooses. So every history reads a position of a
text after the same tokens, and on a backend whose logits depend on these alone, bit for bit, all checksums are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from specdec.inference.model.slots import Backend, ForkingBackend, Span

DRAFTS = ("none", "true", "lying", "mixed")
"""Draft tokens of a history: none, the text's own tokens, wrong tokens, or right ones up to some wrong token."""
KINDS = ("alone", *DRAFTS)
"""Kinds of histories: one text after the other ("alone"), or several texts at a time with draft tokens of one kind."""
LENGTH, NUM_SHARED = 45, 13
"""Number of tokens of each text in `different`, and number of first tokens that are the same in all of these texts."""
WIDEST = 7
"""Most draft tokens that one sequence has verified in a pass."""

Checksums: TypeAlias = dict[tuple[int, int], int]
"""Checksum of the logits at a position, by the number of the text and the position in it."""


def texts_of(vocab_size: int, *, num: int, length: int, num_shared: int, seed: int = 0) -> list[list[int]]:
    """Return `num` texts of `length` random token ids, which all begin with the same `num_shared` ids."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, vocab_size, num_shared).tolist()
    return [[*shared, *rng.integers(2, vocab_size, length - num_shared).tolist()] for _ in range(num)]


def different(backend: Backend, kinds: Iterable[str] = KINDS) -> dict[str, int]:
    """Run a history of each kind; return, by kind, at how many positions the logits differ from those of plain reading.

    Plain reading is one pass per text. Logits differ if any bit differs.
    """
    texts = texts_of(backend.vocab_size, num=4, length=LENGTH, num_shared=NUM_SHARED)
    expected, found = read_whole(backend, texts), {}
    for kind in kinds:
        drafts, beside = ("none", 1) if kind == "alone" else (kind, backend.num_slots)
        history = History(backend, texts, np.random.default_rng(0), NUM_SHARED, drafts, beside)
        found[kind] = num_different(expected, history.checksums())
    return found


def read_whole(backend: Backend, texts: Sequence[Sequence[int]]) -> Checksums:
    """Read each text in one pass of its own; return the checksums of the logits at all positions."""
    found: Checksums = {}
    for number, text in enumerate(texts):
        logits = backend.forward([Span(0, 0, text, len(text))])
        found |= {(number, position): _checksum(row) for position, row in enumerate(logits)}
    return found


def num_different(one: Mapping[tuple[int, int], int], other: Mapping[tuple[int, int], int]) -> int:
    """Return the number of positions in `other` whose checksums differ from those in `one`, which has all of them."""
    return sum(one[place] != checksum for place, checksum in other.items())


@dataclass(slots=True)
class _Reader:
    text: int
    at: int  # position that is read next
    prompt: int  # tokens that are read in parts, without logits


@dataclass(slots=True)
class History:
    """Random passes over texts, as an engine makes them: prompts in parts, then draft tokens that are verified.

    Texts begin at random times, each in a free slot (a sequence's part of the KV cache), often with a copied prefix.

    Attributes:
        num_shared: number of tokens with which all texts begin; a prefix of at most this length may be copied.
        drafts: kind of draft tokens, one of DRAFTS.
        beside: most texts that are read at a time; 1 reads one text after the other.
    """

    backend: Backend
    texts: Sequence[Sequence[int]]
    rng: np.random.Generator
    num_shared: int
    drafts: str
    beside: int
    _readers: dict[int, _Reader] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)  # shared tokens that each slot holds

    def checksums(self) -> Checksums:
        """Run passes until all texts are read; return the checksums of all logits at verified positions."""
        found: Checksums = {}
        waiting = self.rng.permutation(len(self.texts)).tolist()
        while waiting or self._readers:
            while waiting and len(self._readers) < self.beside and (not self._readers or self.rng.random() < 0.4):
                self._begin(waiting.pop())
            slots = self.rng.permutation(list(self._readers)).tolist()[: self.rng.integers(1, len(self._readers) + 1)]
            spans = [self._span(slot) for slot in slots]
            rows = iter(self.backend.forward(spans))
            for span in spans:
                found |= self._seen(span, rows)
        return found

    def _begin(self, text: int) -> None:
        """Put text number `text` into a random free slot, often with a copied prefix.

        The prefix is from a slot that has all the tokens with which the texts begin.
        """
        free = [slot for slot in range(self.backend.num_slots) if slot not in self._readers]
        slot = int(self.rng.choice(free))
        sources = [source for source, held in self._held.items() if held == self.num_shared]
        start = 0
        if sources and isinstance(self.backend, ForkingBackend) and self.rng.random() < 0.7:
            start = int(self.rng.integers(1, self.num_shared + 1))
            self.backend.fork(int(self.rng.choice(sources)), slot, 0, start)
        self._held[slot] = start
        self._readers[slot] = _Reader(text, start, int(self.rng.integers(start, len(self.texts[text]) // 2 + start)))

    def _span(self, slot: int) -> Span:
        it = self._readers[slot]
        text = self.texts[it.text]
        if it.at < it.prompt:
            end = int(self.rng.integers(it.at, min(it.prompt, len(text) - 1))) + 1
            return Span(slot, it.at, text[it.at : end], 0)
        num_drafts = 0 if self.drafts == "none" else int(self.rng.integers(0, WIDEST + 1))
        token_ids = list(text[it.at : it.at + 1 + num_drafts])
        first_lie = {"lying": 1, "mixed": int(self.rng.integers(1, WIDEST + 2))}.get(self.drafts, len(token_ids))
        for place in range(first_lie, len(token_ids)):
            token_ids[place] = 1 + token_ids[place] % (self.backend.vocab_size - 1)
        return Span(slot, it.at, token_ids, len(token_ids))

    def _seen(self, span: Span, rows: Iterator[Any]) -> Checksums:
        """Return checksums of a span's logits up to the first wrong draft token; the text goes on at that position.

        `rows` iterates over the logits of the whole pass; its next rows are the span's, and all of them are taken.
        """
        it, found = self._readers[span.slot], Checksums()
        text, start = self.texts[it.text], span.start
        num_true = next((i for i, token in enumerate(span.token_ids) if token != text[start + i]), len(span.token_ids))
        for place in range(span.num_logits):
            row = next(rows)
            if place < num_true:
                found[it.text, start + place] = _checksum(row)
        it.at = start + num_true
        self._held[span.slot] = min(it.at, self.num_shared)
        if it.at == len(text):
            del self._readers[span.slot]
        return found


def _checksum(row: Any) -> int:
    return crc32(np.ascontiguousarray(row).tobytes())
