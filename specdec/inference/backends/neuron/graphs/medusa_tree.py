"""Tokens of one Medusa pass: a chain that ends with the last committed token, then a tree of guesses.

A choice is a path in the tree: (0, 2) is the third best token of the second head after the best token of the first.
Choices are sorted as tuples, and nodes have their order, so the first child of a node comes right after it. Thus the
nodes of the likeliest path are consecutive, and their keys and values are written to the positions of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Choice = tuple[int, ...]


def num_ranks(choices: Sequence[Sequence[int]]) -> int:
    """Return how many of a head's best tokens a tree uses, but at least 2.

    Asked for 1, NxDI's sampler returns a single token in place of a list of the best ones.
    """
    return max(2, 1 + max(max(choice) for choice in choices))


@dataclass(frozen=True, slots=True)
class TreePass:
    """Nodes of one Medusa pass: committed tokens, then a tree of guesses.

    Attributes:
        token_ids: the token of every node.
        parents: index of every node's parent, which comes before it; -1 for the first.
        root: index of the last committed token; the nodes before it are its ancestors, those after it are guesses.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    root: int

    @property
    def num_guesses(self) -> int:
        return len(self.token_ids) - self.root - 1

    @property
    def depths(self) -> list[int]:
        """Number of ancestors of every node."""
        return [len(self.ancestors(node)) - 1 for node in range(len(self.parents))]

    def ancestors(self, node: int) -> list[int]:
        """Return a node and its ancestors, which are the nodes of this pass that it attends to."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path

    def accepted(self, chosen: Sequence[int]) -> list[int]:
        """Return the longest path of guesses, from the root down, that equal the target's own tokens.

        Args:
            chosen: for every node, the token that the target chooses after it.

        Returns:
            Indices of the path's nodes, without the root.
        """
        children = {
            (self.parents[node], self.token_ids[node]): node for node in range(self.root + 1, len(self.parents))
        }
        path, node = [], self.root
        while (child := children.get((node, chosen[node]))) is not None:
            path.append(child)
            node = child
        return path

    def num_in_place(self, path: Sequence[int]) -> int:
        """Return how many accepted guesses are consecutive nodes after the root.

        Their keys and values are at the positions of their tokens already.

        Args:
            path: nodes of the accepted guesses, as `accepted` returns them.
        """
        return sum(1 for step, node in enumerate(path, start=self.root + 1) if node == step)


def tree_pass(
    chain: Sequence[int], choices: Sequence[Choice], guesses: Sequence[Sequence[int]], *, width: int
) -> TreePass:
    """Lay out the nodes of a pass, at most `width` of them.

    Args:
        chain: committed tokens whose keys and values are not at their positions yet; at least the last one.
        choices: paths of the tree, sorted.
        guesses: best tokens of every head, the likeliest first.
    """
    token_ids, parents = list(chain), list(range(-1, len(chain) - 1))
    nodes: dict[Choice, int] = {(): len(chain) - 1}
    for choice in choices[: width - len(chain)]:
        nodes[choice] = len(token_ids)
        parents.append(nodes[choice[:-1]])
        token_ids.append(guesses[len(choice) - 1][choice[-1]])
    return TreePass(token_ids, parents, len(chain) - 1)
