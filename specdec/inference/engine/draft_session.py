"""Draft tokens of one sequence: a chain, and branches where the chain is uncertain.

The chain is the draft's best guess after the committed tokens. A branch begins where the chain's token scored little
better than the runner-up, the second best token; it holds the runner-up and a few tokens after it. If the target
rejects the chain's token and chooses the runner-up, the branch becomes the chain: the target has the branch already,
and need not wait for new draft tokens. Draft and target number the tokens that are sent, the nodes of a tree, in the
order of sending. A session knows which of its tokens were sent, and their numbers, but not the wire. Only the engine's
loop changes it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.inference.engine.prefixes import Prefix
from specdec.inference.model.decoder import Matcher
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.model.token_map import SAME_IDS, TokenMap
from specdec.inference.request import SamplingParams
from specdec.inference.scheduling.acceptance import Confidence
from specdec.inference.scheduling.pacing import MIN_BRANCH_MASS, Pacing, expected_gain, is_first_message_complete
from specdec.inference.speculation.tree import Branch
from specdec.inference.tokens import Tally, TokenView, common_length


@dataclass(slots=True, eq=False)
class DraftPath:
    """Consecutive draft tokens, a chain or a branch, which the draft model makes in one slot.

    Attributes:
        slot: slot of the draft model that holds the keys and values of the path.
        start: position in the sequence of the path's first token.
        tokens: the draft tokens.
        rates: per token, the probability that the target chooses the same token, given that it chose all tokens before
            it.
        nodes: for each token of the path that was sent to the target, always the first ones, its number as a node of
            the target's draft tree.
        exhausted: True if the proposer has no further token for this path.
    """

    slot: int
    start: int
    tokens: list[DraftToken] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    exhausted: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def advance(self, start: int) -> None:
        """Drop the tokens before position `start` of the sequence, since they are committed now."""
        count = start - self.start
        self.start = start
        self.tokens, self.rates, self.nodes = self.tokens[count:], self.rates[count:], self.nodes[count:]

    @property
    def num_unsent(self) -> int:
        return len(self.tokens) - len(self.nodes)

    @property
    def survivals(self) -> list[float]:
        """Return, per token, the probability that the target chooses it and all tokens before it."""
        return list(itertools.accumulate(self.rates, operator.mul))

    @property
    def survival(self) -> float:
        return math.prod(self.rates)


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """Sequence for which draft tokens are wanted.

    Attributes:
        token_ids: the prompt, then the output so far.
        sampling: the request's sampling parameters.
        output_start: position of the first output token; None if there is no output yet.
        cache_salt: the request's cache salt; sequences with different salts share no cached tokens.
        token_map: map from the target's token ids to the draft model's.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output_start: int | None = None
    cache_salt: str = ""
    token_map: TokenMap = SAME_IDS


class DraftSession:
    """State of one sequence for which a draft model's engine proposes tokens: committed tokens, chain and branches.

    Args:
        sequence: the sequence, with its parameters.
        num_slots, num_branches: number of the engine's slots for sequences, and of slots for each one's branches; see
            `Proposer`.
        confidence: estimate of how likely a draft token is to be accepted, learned from commits; shared by all
            sessions.

    Attributes:
        slot: slot of the chain; None while the session waits for one.
        committed: the prompt and the committed output; the list grows.
        grammar: matcher of the request's grammar, once it is compiled; without it fewer draft tokens are accepted.
        pacing: how many draft tokens and branches to make, and when to send them.
        num_branch_hits: number of commits after which a branch that had been sent to the target became the chain.
        num_wasted_tokens: draft tokens that were dropped.
        error: why the engine ended the session; None while it goes on.
    """

    def __init__(
        self,
        sequence: DraftedSequence,
        *,
        num_slots: int = 1,
        num_branches: int = 0,
        confidence: Confidence | None = None,
    ) -> None:
        self.slot: int | None = None
        self.committed = list(sequence.token_ids)
        self.output_start = len(self.committed) if sequence.output_start is None else sequence.output_start
        self.sampling = sequence.sampling
        self._tally = Tally(self.output_start) if self.sampling.penalizes else None
        self.grammar: Matcher | None = None
        self._token_map = sequence.token_map
        self._cache_salt = f"{self._token_map.name}{sequence.cache_salt}"  # ids of another tokenizer are other text
        self.pacing = Pacing()
        self.num_branch_hits = 0
        self.num_wasted_tokens = 0
        self._num_slots = num_slots
        self._num_branches = num_branches
        self._confidence = confidence or Confidence()
        self._slots: list[int] = []
        self._path = DraftPath(0, len(self.committed))
        self._branches: list[DraftPath] = []
        self._changed = asyncio.Event()
        self._entered_at = 0  # number of committed tokens when it took its slot
        self.error: Exception | None = None
        self.is_suspect = False

    def enter(self, slot: int, num_cached_tokens: int = 0) -> None:
        """Take a slot for the chain, and the slots that belong to it for branches.

        `num_cached_tokens` is not used, since the proposer itself knows which tokens its slots have cached.
        """
        first = self._num_slots + slot * self._num_branches
        self.slot, self._path.slot = slot, slot
        self._slots = [slot, *range(first, first + self._num_branches)]
        self._entered_at = len(self.committed)
        self._changed.set()

    def leave(self) -> None:
        """Give up the slots, drop the branches and stop drafting; the chain is kept."""
        self.slot, self._branches, self.pacing = None, [], Pacing()
        self._changed.set()

    @property
    def can_yield(self) -> bool:
        """Return whether tokens were committed since the session took its slot; then leaving the slot loses no work."""
        return len(self.committed) > self._entered_at

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.set()

    def replay(self) -> None:
        """Mark the session as one that may have made a step fail (guard.py); its chain and branches are kept."""
        self.is_suspect = True

    @property
    def wanted(self) -> Prefix:
        """Return the prefix of the session's tokens whose keys and values it could reuse if a slot has them already."""
        return Prefix(self.committed, len(self.committed) - 1, self._cache_salt)

    @property
    def held(self) -> Prefix:
        """Return the prefix of the session's tokens that its slot probably has cached; only the proposer is certain."""
        return Prefix(self.committed, len(self.committed), self._cache_salt)

    @property
    def chain(self) -> list[int]:
        return self._path.token_ids

    @property
    def branches(self) -> list[list[int]]:
        """Return, per branch, the token ids of the chain up to where the branch begins, then those of the branch."""
        return [self._whole(branch) for branch in self._branches]

    def _whole(self, path: DraftPath) -> list[int]:
        return [*self.chain[: path.start - self._path.start], *path.token_ids]

    def growing(self, max_length: int) -> list[DraftPath]:
        """Begin the branches that are due; return the chain and branches that the next step should extend.

        A chain or branch of which the sequence is longer than `max_length` tokens, for which the draft model has no
        space, is marked as exhausted and left out.
        """
        self._begin_branches()
        for path in (self._path, *self._branches):
            if self._num_wanted(path) > 0 and path.end > max_length:
                self.extend(path, ())  # the draft's slot is full: the target decodes alone
        return [path for path in (self._path, *self._branches) if self._num_wanted(path) > 0]

    def _num_wanted(self, path: DraftPath) -> int:
        if path.exhausted or not self.pacing.window:
            return 0
        if path is not self._path:
            return 1 + self.pacing.branching.depth - len(path.tokens)
        if path.survival < self.pacing.min_survival:
            return 0
        return self.pacing.window - len(path.tokens)

    def pace(self, pacing: Pacing) -> None:
        """Set how many draft tokens and branches to make from now on; wake the tasks that wait for draft tokens."""
        self.pacing = pacing
        self._changed.set()

    def draft(self, path: DraftPath) -> Draft:
        """Return the input by which the proposer extends `path`."""
        return Draft(
            path.slot,
            TokenView(self.committed, tail=self._whole(path)),
            self.sampling,
            self._num_wanted(path),
            self.output_start,
            None if path is self._path else self._path.slot,
            self.grammar,
            self._tally,
            self._token_map,
        )

    def _begin_branches(self) -> None:
        pacing = self.pacing
        num_more = pacing.branching.count - len(self._branches)
        if num_more <= 0 or len(self._path.tokens) < min(pacing.window, pacing.branching.min_chain):
            return
        used = {path.slot for path in (self._path, *self._branches)}
        free = [slot for slot in self._slots if slot not in used]
        for slot, (_, start, runner_up) in zip(free[:num_more], self._doubts(), strict=False):
            self._branches.append(DraftPath(slot, start, [DraftToken(runner_up)], [1.0]))

    def _doubts(self) -> list[tuple[float, int, int]]:
        """Return (-probability of rejection, position, second best token) of chain tokens without a branch.

        The riskiest come first. Tokens that are nearly sure are left out, and those whose positions the target decodes
        before a branch arrives.
        """
        first = len(self.committed) + self.pacing.num_ahead - self.pacing.branching.depth
        covered = {branch.start for branch in self._branches}
        path = self._path
        failing = [before - after for before, after in itertools.pairwise([1.0, *path.survivals])]
        places = zip(itertools.count(path.start), path.tokens, failing, strict=False)
        return sorted(
            (-probability, position, token.runner_up)
            for position, token, probability in places
            if token.runner_up is not None and probability >= MIN_BRANCH_MASS and first <= position not in covered
        )

    def extend(self, path: DraftPath, tokens: Sequence[DraftToken]) -> None:
        """Append a step's tokens to `path`; if there are none, mark the path as exhausted.

        Tokens beyond the length that the path should have by now are left out. If the session dropped `path` during the
        step, the tokens only count as wasted.
        """
        if path is not self._path and path not in self._branches:
            self.num_wasted_tokens += len(tokens)
            return
        kept = tokens[: max(0, self._num_wanted(path))]
        path.tokens.extend(kept)
        path.rates.extend(map(self._confidence.rate, kept))
        path.exhausted = not tokens
        self._changed.set()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens; the chain or branch that agrees with all of them goes on as the chain.

        If none does, a new chain begins after the committed tokens.
        """
        self._learn(token_ids)
        paths = [self._path, *self._branches]
        num_agreeing = [common_length(self._whole(path), token_ids) for path in paths]
        best = max(range(len(paths)), key=num_agreeing.__getitem__)
        self.num_branch_hits += bool(best and paths[best].nodes)
        num_tokens = self._num_tokens - num_agreeing[best]
        self.committed.extend(token_ids)
        if num_agreeing[best] < len(token_ids):
            self._go_on(DraftPath(self._path.slot, len(self.committed)))
        else:
            self._go_on(paths[best])
        self.num_wasted_tokens += num_tokens - self._num_tokens

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Record which of the chain's tokens were accepted, up to the first rejected one; later ones are untested."""
        for token, committed in zip(self._path.tokens, token_ids, strict=False):
            self._confidence.record(token, accepted=token.token_id == committed)
            if token.token_id != committed:
                return

    @property
    def _num_tokens(self) -> int:
        return sum(len(path.tokens) for path in (self._path, *self._branches))

    def _go_on(self, path: DraftPath) -> None:
        """Make `path` the chain from the latest commit on.

        Branches that begin at tokens which are committed by now are dropped; all branches are if `path` was not the
        chain before.
        """
        start = len(self.committed)
        if path is not self._path and len(path.tokens) == 1:  # the draft model has not used its slot yet
            path.slot = self._path.slot
        keeps_branches = path is self._path
        self._branches = [branch for branch in self._branches if keeps_branches and branch.start >= start]
        self._path = path
        path.advance(start)
        path.exhausted = False

    def take_unsent(self, first_node: int) -> list[Branch]:
        """Return the tokens to send now, as `Branch`es, and mark them as sent, with numbers from `first_node` on.

        They are all unsent tokens of the chain, and those of branches that are long enough. The chain's tokens come
        first: if two tokens follow the same one, the target verifies the one that arrived first.
        """
        branches = []
        for path in (self._path, *self._branches):
            if path.num_unsent if path is self._path else self._is_ripe(path):
                branches.append(self._take(path, first_node))
                first_node += len(branches[-1].token_ids)
        return branches

    def _is_ripe(self, path: DraftPath) -> bool:
        """Return whether a path's unsent tokens should be sent to the target now."""
        if not path.num_unsent:
            return False
        if path is not self._path:  # a runner-up without a successor saves no token
            return len(path.tokens) > 1 and (self._num_wanted(path) <= 0 or path.num_unsent > self.pacing.chunk)
        if self._num_wanted(path) > 0 and not self._is_chunk(path):
            return False
        return expected_gain(path.survivals, len(path.nodes), self.pacing) >= self.pacing.min_gain

    def _is_chunk(self, path: DraftPath) -> bool:
        """Return whether a chain that still grows has enough new tokens for a message."""
        if path.num_unsent >= self.pacing.chunk:
            return True
        return not path.nodes and is_first_message_complete(path.survivals, self.pacing)

    def _take(self, path: DraftPath, first_node: int) -> Branch:
        token_ids = path.token_ids[len(path.nodes) :]
        num_before = path.start - self._path.start  # tokens of the chain before the branch
        parents = [*self._path.nodes[:num_before], *path.nodes]
        path.nodes.extend(range(first_node, first_node + len(token_ids)))
        return Branch(parents[-1] if parents else None, len(self.committed), token_ids)

    async def drafted(self) -> list[int]:
        """Wait until the chain fills the window or can grow no further; return its token ids.

        Raises:
            Exception: the error with which the engine ended this session.
        """
        await self._until(lambda: self._num_wanted(self._path) <= 0)
        return self.chain

    async def has_unsent(self) -> None:
        """Wait until there are enough unsent tokens for a message, which `take_unsent` then returns.

        Raises:
            Exception: the error with which the engine ended this session.
        """
        await self._until(lambda: any(self._is_ripe(path) for path in (self._path, *self._branches)))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self.error is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
