"""Draft tree of one session: the tokens that a draft worker has proposed after the committed ones.

The tree decides which proposed tokens the target may still accept. It does not know the wire, the model, or when a pass
happens. Draft worker and target both number the proposed tokens in the order in which they are sent, so that a later
branch can name the token that it follows, its parent. A branch and a commit may cross on the wire, so a branch may
still name a token that was committed or rejected meanwhile, as long as it is one of the latest `MAX_NUMBERS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.inference.errors import InvalidRequestError
from specdec.inference.tokens import common_length

MAX_TREE_TOKENS = 256
"""Most tokens in a tree, and of one branch."""
MAX_NUMBERS = 4096
"""Number of latest tokens that a branch can name as its parent; a branch with an older parent is ignored."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Chain of draft tokens, as a draft worker proposes it.

    Attributes:
        parent_node: number of the proposed token that the branch follows; None if it follows a committed token.
        prefix_length: number of committed tokens before the branch, if there is no parent node.
        token_ids: the draft tokens; at least one.
        step_us: time of one step of the worker's model, in microseconds; 0 while unknown.
    """

    parent_node: int | None
    prefix_length: int
    token_ids: Sequence[int]
    step_us: int = 0

    def check(self, *, num_committed: int, num_numbers: int) -> None:
        """Check that a draft tree can take this branch.

        Args:
            num_committed: number of committed tokens of the session, prompt included.
            num_numbers: number of tokens that were proposed so far; see `DraftTree.num_numbers`.

        Raises:
            InvalidRequestError: the branch has too many tokens, its parent was never proposed, or its prefix is longer
                than the committed tokens.
        """
        num_tokens, parent = len(self.token_ids), self.parent_node
        if num_tokens > MAX_TREE_TOKENS:
            raise InvalidRequestError(f"a branch of {num_tokens} tokens exceeds the limit of {MAX_TREE_TOKENS}")
        if parent is None and self.prefix_length > num_committed:
            fault = f"branch grows from a prefix of {self.prefix_length} tokens, but only {num_committed} are committed"
            raise InvalidRequestError(fault)
        if parent is not None and not 0 <= parent < num_numbers:
            fault = f"branch grows from node {parent}, but only {num_numbers} nodes have been proposed"
            raise InvalidRequestError(fault)


@dataclass(slots=True, eq=False)
class _Node:
    """Proposed token, or the last committed one.

    Attributes:
        length: number of tokens of the sequence up to and including this one.
        numbers: the numbers under which it was proposed; a token that was proposed several times has several.
        children: proposed tokens that follow it, by token id, in order of arrival.
    """

    length: int
    numbers: list[int] = field(default_factory=list)
    children: dict[int, _Node] = field(default_factory=dict)  # by token id, in order of arrival


class DraftTree:
    """Draft tokens that the target may still accept. Proposals add tokens, commits remove them.

    Args:
        committed: the session's token ids; the session appends to this list before it calls `commit`.
        max_tokens: most tokens in the tree that may still be accepted; further proposals are ignored.
    """

    def __init__(self, committed: Sequence[int], *, max_tokens: int = MAX_TREE_TOKENS) -> None:
        self._committed = committed
        self._max_tokens = max_tokens
        self._root = _Node(length=len(committed))
        self._nodes: dict[int, _Node] = {}  # live and committed nodes, by number
        self._num_numbers = 0
        self._num_forgotten = 0  # all smaller numbers are forgotten
        self._num_live = 0

    def __len__(self) -> int:
        """Return how many proposed tokens may still be accepted: neither committed nor contradicted by a commit."""
        return self._num_live

    @property
    def num_numbers(self) -> int:
        """Return how many tokens were proposed so far; the next one gets this as its number."""
        return self._num_numbers

    def grow(self, branch: Branch) -> None:
        """Add a branch after its parent; if a commit has dropped the parent, only number the branch's tokens.

        Raises:
            InvalidRequestError: the branch is not valid, see `Branch.check`.
        """
        branch.check(num_committed=len(self._committed), num_numbers=self._num_numbers)
        if branch.parent_node is None:
            self._grow(branch.prefix_length, self._root, branch.token_ids)
        elif (node := self._nodes.get(branch.parent_node)) is not None:
            self._grow(node.length, node, branch.token_ids)
        else:
            self._num_numbers += len(branch.token_ids)
        self._forget()

    def _grow(self, length: int, node: _Node, token_ids: Sequence[int]) -> None:
        first = self._num_numbers
        self._num_numbers += len(token_ids)
        num_late = max(0, min(len(token_ids), len(self._committed) - length))
        num_agreed = common_length(token_ids[:num_late], self._committed[length : length + num_late])
        for number, end in enumerate(range(length + 1, length + num_agreed + 1), start=first):
            self._name(number, self._root if end == len(self._committed) else _Node(end))
        if num_agreed < num_late:
            return
        node = self._root if num_late else node
        for number, token_id in enumerate(token_ids[num_late:], start=first + num_late):
            child = node.children.get(token_id) or self._add_child(node, token_id)
            if child is None:
                return
            node = child
            self._name(number, node)

    def _name(self, number: int, node: _Node) -> None:
        self._nodes[number] = node
        node.numbers.append(number)

    def _forget(self) -> None:
        """Drop the numbers of tokens that are too old for a branch to name them as its parent."""
        oldest = self._num_numbers - MAX_NUMBERS
        for number in range(self._num_forgotten, oldest):
            node = self._nodes.pop(number, None)
            if node is not None:
                node.numbers.remove(number)
        self._num_forgotten = max(self._num_forgotten, oldest)

    def _add_child(self, node: _Node, token_id: int) -> _Node | None:
        if self._num_live >= self._max_tokens:
            return None
        self._num_live += 1
        child = node.children[token_id] = _Node(length=node.length + 1)
        return child

    def path(self, limit: int) -> list[int]:
        """Return up to `limit` tokens to verify next: after the committed ones, along the first child of each node."""
        token_ids: list[int] = []
        node = self._root
        while node.children and len(token_ids) < limit:
            token_id, node = next(iter(node.children.items()))
            token_ids.append(token_id)
        return token_ids

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move the root along newly committed tokens, and drop every proposed token that disagrees with them."""
        for token_id in token_ids:
            old = self._root
            winner = old.children.pop(token_id) if token_id in old.children else None
            self._num_live -= winner is not None
            self._root = winner or _Node(length=old.length + 1)
            for loser in old.children.values():
                self._drop(loser)
            old.children.clear()

    def _drop(self, node: _Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            self._num_live -= 1
            for number in node.numbers:
                del self._nodes[number]
            stack.extend(node.children.values())
