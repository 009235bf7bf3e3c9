"""Earlier answers, kept up to a limit of memory, in which draft tokens for later requests are looked up.

Each account has an index of its own, so no search can reach the text of another. All calls come from one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from specdec.inference.speculation.lookup import MATCHES, Guide, Lookup
from specdec.inference.speculation.suffix_index import END, SuffixIndex

MAX_ANSWER_TOKENS = 32 * 1024
"""Most tokens of an answer that are kept, its first ones; more would make the end of a request slow."""
_OWNER_BYTES, _ANSWER_BYTES = 2048, 512
"""Bytes that each owner (account with a cache salt), and each answer, is assumed to take besides the tokens."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Request from which an answer came, as far as it decides which later requests may get a similar answer.

    Attributes:
        owner: account and cache salt of the request, see `Caller.owner`.
        prompt: token ids of the prompt, without output.
        seed: seed of the request; None where it has no effect.
    """

    owner: str
    prompt: Sequence[int]
    seed: int | None = None

    @property
    def keys(self) -> list[Hashable]:
        """Return the keys of the answer: its prompt with its seed, then its prompt alone.

        Prompts stand as hashes; if two have the same, that costs only speed.
        """
        digest = hash(tuple(self.prompt))
        return [(digest, self.seed), digest]


@dataclass(slots=True)
class _Shelf:
    """Kept answers of one owner, that is of one account with one cache salt.

    Attributes:
        index: index of all answers, one after another.
        answers: where each answer begins in the index, and its keys; oldest first.
        starts: where the newest answer with a key begins in the index.
    """

    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(MATCHES[0]))
    answers: deque[tuple[int, list[Hashable]]] = field(default_factory=deque)
    starts: dict[Hashable, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return _OWNER_BYTES + _ANSWER_BYTES * len(self.answers) + self.index.num_bytes

    def add(self, keys: list[Hashable], answer: Sequence[int]) -> None:
        start = self.index.end
        self.index.append([*answer, END])
        self.starts.update(dict.fromkeys(keys, start))
        self.answers.append((start, keys))

    def drop(self) -> None:
        """Remove the oldest answer, with its keys."""
        start, keys = self.answers.popleft()
        for key in keys:
            if self.starts.get(key) == start:
                del self.starts[key]
        self.index.forget(self.answers[0][0] if self.answers else self.index.end)


class KeptAnswers:
    """Token ids of finished answers, by owner (account and cache salt); above `size` bytes, the oldest are dropped.

    Args:
        size: most memory, in bytes; 0 keeps nothing.

    Attributes:
        num_bytes: memory in use, in bytes; an estimate that is rather too high.
    """

    def __init__(self, size: int = 0) -> None:
        self._size, self.num_bytes = size, 0
        self._shelves: dict[str, _Shelf] = {}
        self._owners: deque[str] = deque()  # of each answer, oldest first

    def lookup(self, origin: Origin, prediction: Sequence[int], own_limit: int) -> Lookup:
        """Return the object that looks up draft tokens for a new request: in its prediction, answers and own text.

        The answers are those kept of the request's owner. The search begins at the newest answer to the same prompt,
        with the same seed if there is one.

        Args:
            origin: owner, prompt and seed of the request.
            prediction: token ids that the request expects as its output; may be empty.
            own_limit: most tokens of a proposal from the request's own text; 0: none is looked up there.
        """
        guides = [Guide.predicted(prediction, len(origin.prompt))] if prediction else []
        if (shelf := self._shelves.get(origin.owner)) is not None:
            key = next((key for key in origin.keys if key in shelf.starts), None)
            is_sure = key == origin.keys[0]  # with another seed, another answer may follow
            guides.append(Guide(shelf.index, shelf.starts.get(key), len(origin.prompt), is_sure=is_sure))
        return Lookup(guides, own_limit)

    def add(self, origin: Origin, answer: Sequence[int]) -> None:
        """Keep an answer's token ids, unless they are fewer than 3, or the beginning of this origin's last answer."""
        answer, keys = answer[:MAX_ANSWER_TOKENS], origin.keys
        if not self._size or len(answer) < MATCHES[0]:
            return
        shelf = self._shelves.setdefault(origin.owner, _Shelf())
        self.num_bytes -= shelf.num_bytes if shelf.answers else 0
        if keys[0] not in shelf.starts or shelf.index.tokens(shelf.starts[keys[0]], len(answer)) != [*answer]:
            shelf.add(keys, answer)
            self._owners.append(origin.owner)
        self.num_bytes += shelf.num_bytes
        while self.num_bytes > self._size:
            self._drop(self._owners.popleft())

    def _drop(self, owner: str) -> None:
        shelf = self._shelves[owner]
        self.num_bytes -= shelf.num_bytes
        shelf.drop()
        if shelf.answers:
            self.num_bytes += shelf.num_bytes
        else:
            del self._shelves[owner]


NO_ANSWERS = KeptAnswers()
"""Store that keeps no answers."""
