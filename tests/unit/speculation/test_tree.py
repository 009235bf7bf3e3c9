"""The draft tree (proposed tokens at a target) equals a simple one that stores each token with its whole path."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.errors import InvalidRequestError
from specdec.inference.speculation.tree import MAX_NUMBERS, Branch, DraftTree

Path = tuple[int, ...]

# Few different tokens, so that branches meet, agree and lose often.
tokens = st.integers(0, 2)
branch = st.lists(tokens, min_size=1, max_size=5)
place = st.floats(0, 1, exclude_max=True)
actions = st.one_of(
    st.tuples(st.just("prefix"), place, branch),
    st.tuples(st.just("node"), place, branch),
    st.tuples(st.just("commit"), place, branch),
)


@dataclass
class NaiveTree:
    """Draft tree that stores each token with the whole sequence before it, and leaves out those that commits refute."""

    committed: list[int]
    max_tokens: int
    by_number: list[Path | None] = field(default_factory=list)  # None: ignored on arrival
    arrived: list[Path] = field(default_factory=list)  # in order, without duplicates

    def alive(self, path: Path) -> bool:
        length = min(len(path), len(self.committed))
        return list(path[:length]) == self.committed[:length]

    @property
    def live(self) -> list[Path]:
        return [path for path in self.arrived if len(path) > len(self.committed) and self.alive(path)]

    def grow(self, parent: Path | None, token_ids: list[int]) -> None:
        for token_id in token_ids:
            parent = self._child(parent, token_id)
            self.by_number.append(parent)

    def _child(self, parent: Path | None, token_id: int) -> Path | None:
        if parent is None or not self.alive(path := (*parent, token_id)):
            return None
        is_new = len(path) > len(self.committed) and path not in self.arrived
        if is_new and len(self.live) >= self.max_tokens:
            return None
        if is_new:
            self.arrived.append(path)
        return path

    def path(self, limit: int) -> list[int]:
        """Return at most `limit` tokens after the committed ones, at each step the child that was proposed first."""
        tip = tuple(self.committed)
        while len(tip) - len(self.committed) < limit:
            children = [path for path in self.live if path[:-1] == tip]
            if not children:
                break
            tip = children[0]
        return list(tip[len(self.committed) :])


@settings(deadline=None, max_examples=200)
@given(
    committed=st.lists(tokens, min_size=1, max_size=4),
    max_tokens=st.sampled_from([1, 4, 9, 256]),
    history=st.lists(actions, max_size=25),
    limit=st.integers(0, 8),
)
def test_equals_the_naive_tree(
    committed: list[int], max_tokens: int, history: list[tuple[str, float, list[int]]], limit: int
) -> None:
    """The tree equals a simple one after commits, and after branches that are late, repeated, orphaned or too many.

    Each action of `history` is (kind, place as a share from 0 to 1 of the places that there are, token ids).
    """
    tree = DraftTree(committed, max_tokens=max_tokens)
    naive = NaiveTree(committed, max_tokens)
    for kind, where, token_ids in history:
        if kind == "commit":
            # A pass commits what the tree proposed, as far as it was accepted, and one token more.
            path = tree.path(8)
            new = [*path[: int(where * (len(path) + 1))], token_ids[0]]
            committed.extend(new)
            tree.commit(new)
        elif kind == "node" and naive.by_number:
            number = int(where * len(naive.by_number))
            tree.grow(Branch(number, 0, token_ids))
            parent = naive.by_number[number]
            naive.grow(parent if parent is not None and naive.alive(parent) else None, token_ids)
        else:
            prefix_length = int(where * (len(committed) + 1))
            tree.grow(Branch(None, prefix_length, token_ids))
            naive.grow(tuple(committed[:prefix_length]), token_ids)
        assert len(tree) == len(naive.live) <= max_tokens
        assert tree.path(limit) == naive.path(limit)


def test_places_that_never_were_are_refused() -> None:
    tree = DraftTree([1, 2])
    with pytest.raises(InvalidRequestError, match="prefix of 3 tokens, but only 2"):
        tree.grow(Branch(None, 3, [1]))
    with pytest.raises(InvalidRequestError, match="node 0, but only 0"):
        tree.grow(Branch(0, 0, [1]))
    tree.grow(Branch(None, 2, [1]))
    with pytest.raises(InvalidRequestError, match="node -1"):
        tree.grow(Branch(-1, 0, [1]))


def test_late_branches_leave_nothing_behind() -> None:
    """Branches below text that is already committed take no memory, though their tokens get numbers.

    Regression: 5 MB of such branches took 1.2 GB for as long as the session lasted.
    """
    committed = [5] * 250
    tree = DraftTree(committed)
    for _ in range(200):
        tree.grow(Branch(None, 0, committed))
    assert tree.num_numbers == 200 * 250
    assert len(tree._nodes) <= MAX_NUMBERS
    tree.grow(Branch(tree.num_numbers - 1, 0, [7]))
    assert tree.path(8) == [7]
    tree.grow(Branch(0, 0, [8]))  # long forgotten: ignored, as if it had lost
    assert len(tree) == 1
