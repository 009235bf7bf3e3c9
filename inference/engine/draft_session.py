"""One sequence at a draft: the chain it believes in, and branches where it does not quite.

The chain is the draft's best guess past the committed tokens. A branch leaves it where its lead over the runner-up was
small: the runner-up, and a few tokens behind it. If the target rejects the chain there and chooses the runner-up, the
branch becomes the chain, and the target, which knows it already, goes on without waiting for us. Owned by the engine's
loop; does not know the wire, only what was sent, under which node numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference.speculation.controller import NO_BRANCHES
from inference.types import Draft, DraftToken, SamplingParams


@dataclass(slots=True, eq=False)
class DraftPath:
    """Draft tokens in a row, made in one slot.

    Attributes:
        start: absolute position of the first token.
        nodes: numbers of those that the target was told of: the first ones.
        exhausted: the proposer has nothing more for this path.
    """

    slot: int
    start: int
    tokens: list[DraftToken] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    exhausted: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def advance(self, start: int) -> None:
        """Leave behind what lies before `start`."""
        count = start - self.start
        self.start, self.tokens, self.nodes = start, self.tokens[count:], self.nodes[count:]


@dataclass(frozen=True, slots=True)
class Growth:
    """Draft tokens to send: behind a node that the target was told of, or behind a committed prefix."""

    parent_node: int | None
    prefix_length: int
    token_ids: list[int]


class DraftSession:
    """One sequence's drafts.

    Args:
        num_slots, num_branches: slots of sequences, and of branches per sequence; see `BranchingProposer`.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_start: int | None = None,
        num_slots: int = 1,
        num_branches: int = 0,
    ) -> None:
        self.slot: int | None = None
        self.committed = list(token_ids)
        self.output_start = len(token_ids) if output_start is None else output_start
        self.sampling = sampling
        self.window = 0
        self.branching = NO_BRANCHES
        self.num_branch_hits = 0
        self.num_wasted_tokens = 0
        self._num_slots = num_slots
        self._num_branches = num_branches
        self._slots: list[int] = []
        self._path = DraftPath(0, len(self.committed))
        self._branches: list[DraftPath] = []
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def enter(self, slot: int) -> None:
        """Take a slot, and with it those of its branches."""
        first = self._num_slots + slot * self._num_branches
        self.slot, self._path.slot = slot, slot
        self._slots = [slot, *range(first, first + self._num_branches)]
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    @property
    def chain(self) -> list[int]:
        return self._path.token_ids

    @property
    def branches(self) -> list[list[int]]:
        """Whole paths past the committed tokens, each leaving the chain somewhere."""
        return [self._whole(branch) for branch in self._branches]

    def known(self) -> list[tuple[list[int], list[int]]]:
        """Of the chain and each branch, the path as far as the target was told of it, and its own nodes there."""
        return [
            (self._whole(path)[: path.start - self._path.start + len(path.nodes)], path.nodes)
            for path in (self._path, *self._branches)
        ]

    def _whole(self, path: DraftPath) -> list[int]:
        return [*self.chain[: path.start - self._path.start], *path.token_ids]

    def growing(self, max_length: int) -> list[DraftPath]:
        """Paths that want another token, begun here if need be; none beyond `max_length` tokens can be extended."""
        self._begin_branches()
        for path in (self._path, *self._branches):
            if self._num_wanted(path) > 0 and path.end > max_length:
                self.extend(path, ())  # out of room: the target goes on alone
        return [path for path in (self._path, *self._branches) if self._num_wanted(path) > 0]

    def _num_wanted(self, path: DraftPath) -> int:
        if path.exhausted or not self.window:
            return 0
        wanted = self.window if path is self._path else 1 + self.branching.depth
        return wanted - len(path.tokens)

    def draft(self, path: DraftPath) -> Draft:
        """What the proposer is asked for."""
        return Draft(
            path.slot,
            [*self.committed, *self._whole(path)],
            self.sampling,
            self._num_wanted(path),
            self.output_start,
            None if path is self._path else self._path.slot,
        )

    def _begin_branches(self) -> None:
        num_more = self.branching.count - len(self._branches)
        if num_more <= 0 or len(self._path.tokens) < min(self.window, self.branching.min_chain) or not self.window:
            return
        used = {path.slot for path in (self._path, *self._branches)}
        free = [slot for slot in self._slots if slot not in used]
        for slot, (_, start, runner_up) in zip(free[:num_more], self._doubts(), strict=False):
            self._branches.append(DraftPath(slot, start, [DraftToken(runner_up)]))

    def _doubts(self) -> list[tuple[float, int, int]]:
        """(margin, position, runner-up) where the chain may be wrong and no branch says what then, doubtful first."""
        covered = {branch.start for branch in self._branches}
        return sorted(
            (token.margin, position, token.runner_up)
            for position, token in enumerate(self._path.tokens, start=self._path.start)
            if token.runner_up is not None and token.margin < self.branching.max_margin and position not in covered
        )

    def extend(self, path: DraftPath, tokens: Sequence[DraftToken]) -> None:
        """Append what a step gave; nothing means that there is nothing more. A path that has lost meanwhile is gone."""
        if path is not self._path and path not in self._branches:
            self.num_wasted_tokens += len(tokens)
            return
        path.tokens.extend(tokens[: max(0, self._num_wanted(path))])
        path.exhausted = not tokens
        self._changed.set()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move committed tokens over. The path that agrees with all of them goes on behind them; others are dropped."""
        paths = [self._path, *self._branches]
        num_agreeing = [_common_length(self._whole(path), token_ids) for path in paths]
        best = max(range(len(paths)), key=num_agreeing.__getitem__)
        self.num_branch_hits += bool(best and paths[best].nodes)
        num_tokens = self._num_tokens - num_agreeing[best]
        self.committed.extend(token_ids)
        if num_agreeing[best] < len(token_ids):
            self._go_on(DraftPath(self._path.slot, len(self.committed)))
        else:
            self._go_on(paths[best])
        self.num_wasted_tokens += num_tokens - self._num_tokens

    @property
    def _num_tokens(self) -> int:
        return sum(len(path.tokens) for path in (self._path, *self._branches))

    def _go_on(self, path: DraftPath) -> None:
        """Make `path` the chain behind the committed tokens; branches of another one have lost."""
        start = len(self.committed)
        if path is not self._path and len(path.tokens) == 1:  # nothing was made in its slot yet
            path.slot = self._path.slot
        keeps_branches = path is self._path
        self._branches = [branch for branch in self._branches if keeps_branches and branch.start >= start]
        self._path = path
        path.advance(start)
        path.exhausted = False

    def forget_sent(self) -> None:
        """The target is another one, or has lost all it was told."""
        for path in (self._path, *self._branches):
            path.nodes = []

    def take_unsent(self, first_node: int) -> list[Growth]:
        """What the target was not told of, taken as told: its tokens get the node numbers from `first_node` on.

        The chain comes first: of two children the target verifies the one that it heard of earlier.
        """
        growths = []
        for path in (self._path, *self._branches):
            if self._has_unsent(path):
                growths.append(self._take(path, first_node))
                first_node += len(growths[-1].token_ids)
        return growths

    def _has_unsent(self, path: DraftPath) -> bool:
        """A branch of one token would be of no use: the target has chosen that token itself by then."""
        return len(path.tokens) > max(len(path.nodes), int(path is not self._path))

    def _take(self, path: DraftPath, first_node: int) -> Growth:
        token_ids = path.token_ids[len(path.nodes) :]
        num_before = path.start - self._path.start  # tokens of the chain in front of a branch
        parents = [*self._path.nodes[:num_before], *path.nodes]
        path.nodes.extend(range(first_node, first_node + len(token_ids)))
        return Growth(parents[-1] if parents else None, len(self.committed), token_ids)

    async def drafted(self) -> list[int]:
        """The chain, once it has reached the window or can grow no further.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: self._num_wanted(self._path) <= 0)
        return self.chain

    async def has_unsent(self) -> None:
        """Wait for something that the target was not told of.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: any(self._has_unsent(path) for path in (self._path, *self._branches)))

    async def admitted(self) -> None:
        """Wait for a slot.

        Raises:
            Exception: the engine failed this session.
        """
        await self._until(lambda: self.slot is not None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._error is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error


def _common_length(drafted: Sequence[int], committed: Sequence[int]) -> int:
    """How many tokens from the first on are equal."""
    pairs = zip(drafted, committed, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(drafted), len(committed)))
