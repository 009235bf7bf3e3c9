"""A draft session's chain of tokens and its branches (alternatives) equal a naive model's and the target's draft tree.

Other tests say which tokens the session sends and when, since a message must save more time than it costs.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.draft_session import DraftedSequence, DraftSession
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.request import SamplingParams
from specdec.inference.scheduling.acceptance import Confidence
from specdec.inference.scheduling.pacing import Branching, Pacing
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.tree import Branch, DraftTree
from tests.support.scripted import until

NUM_TOKENS = 3
"""Number of different tokens: so few that commits often follow a branch."""
MARK = 99

token = st.integers(0, NUM_TOKENS - 1)
actions = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 3), token),
    st.tuples(st.just("extend"), st.just(0), token),
    st.tuples(st.just("send"), st.just(0), st.just(0)),
    st.tuples(st.just("arrive"), st.just(0), st.just(0)),
    st.tuples(st.just("commit"), st.integers(0, 3), token),
    st.tuples(st.just("learn"), st.just(0), st.just(0)),
)


def survivors(paths: Sequence[list[int]], committed: list[int]) -> list[list[int]]:
    """Return what follows the committed tokens in each path that begins with all of them."""
    return [path[len(committed) :] for path in paths if path[: len(committed)] == committed]


class Link:
    """A draft session, a target's draft tree, and the messages on their way between the two."""

    def __init__(self) -> None:
        self.session = DraftSession(DraftedSequence([7]), num_slots=2, num_branches=2)
        self.session.enter(1)
        self.session.pacing = Pacing(window=8, branching=Branching(count=2, depth=2))
        self.committed = [7]
        self.tree = DraftTree(self.committed)
        self.num_nodes = 0
        self.up: deque[list[Branch]] = deque()
        self.down: deque[list[int]] = deque()

    def act(self, kind: str, where: int, token_id: int) -> None:
        if kind == "extend":
            self.extend(where, token_id)
        elif kind == "send":
            branches = self.session.take_unsent(self.num_nodes)
            self.num_nodes += sum(len(branch.token_ids) for branch in branches)
            self.up.append(branches)
        elif kind == "arrive" and self.up:
            for branch in self.up.popleft():
                self.tree.grow(branch)
        elif kind == "commit":
            self.commit([*self.tree.path(where), token_id])
        elif kind == "learn" and self.down:
            self.learn(self.down.popleft())

    def extend(self, where: int, token_id: int) -> None:
        paths = self.session.growing(max_length=1000)
        used = [path.slot for path in paths]
        assert len(set(used)) == len(used)
        assert set(used) <= {1, 4, 5}  # 2 slots of sequences, then 2 branches of each
        if paths:
            path = paths[where % len(paths)]
            draft = self.session.draft(path)
            assert list(draft.token_ids[: len(self.session.committed)]) == self.session.committed
            self.session.extend(path, [DraftToken(token_id, (token_id + 1) % NUM_TOKENS, 0.5)])

    def commit(self, token_ids: list[int]) -> None:
        self.committed.extend(token_ids)
        self.tree.commit(token_ids)
        self.down.append(token_ids)

    def learn(self, token_ids: list[int]) -> None:
        session = self.session
        expected = survivors([session.chain, *session.branches], token_ids)
        session.commit(token_ids)
        assert session.chain == (expected[0] if expected else [])
        assert session.branches == expected[1:]

    def settle(self) -> None:
        """Deliver all messages in both directions."""
        self.act("send", 0, 0)
        while self.up:
            self.act("arrive", 0, 0)
        while self.down:
            self.act("learn", 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=60))
def test_the_target_holds_what_the_session_believes_it_holds(history: list[tuple[str, int, int]]) -> None:
    link = Link()
    for action in history:
        link.act(*action)
    link.settle()
    session, tree = link.session, link.tree
    assert session.committed == link.committed
    known = list(sent(session))
    assert len(tree) == sum(len(nodes) for _, nodes in known)
    assert tree.path(1000) == known[0][0]
    for path, nodes in known:
        if nodes:
            assert ends_at(link, path, nodes[-1])


def sent(session: DraftSession) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (token ids, their numbers in the target's tree) of the chain and of each branch, as far as sent."""
    chain = session._path
    for path, token_ids in zip((chain, *session._branches), (session.chain, *session.branches), strict=True):
        yield token_ids[: path.start - chain.start + len(path.nodes)], path.nodes


def ends_at(link: Link, path: list[int], node: int) -> bool:
    """Return whether node number `node` of the target's tree is the last token of `path`.

    If so, a token that is sent below this node extends the path.
    """
    committed, tree = copy.deepcopy((link.committed, link.tree))
    committed.extend(path)
    tree.commit(path)
    tree.grow(Branch(node, 0, [MARK]))
    num_tokens = len(tree)
    tree.grow(Branch(None, len(committed), [MARK]))
    return len(tree) == num_tokens and num_tokens > 0


def drafted(session: DraftSession, *token_ids: int, margin: float = 0.5) -> None:
    (path, *_) = session.growing(1000)
    session.extend(path, [DraftToken(token_id, token_id + 1, margin) for token_id in token_ids])


def branching_session(num_branches: int = 2) -> DraftSession:
    session = DraftSession(DraftedSequence([7]), num_slots=1, num_branches=num_branches)
    session.enter(0)
    session.pacing = Pacing(window=4, branching=Branching(count=num_branches, depth=2))
    return session


def test_branches_leave_the_chain_where_it_is_least_certain() -> None:
    session = branching_session()
    for token_id, margin in ((10, 0.9), (20, 5.0), (30, 0.1), (40, 0.5)):
        drafted(session, token_id, margin=margin)
    session.growing(1000)
    assert session.branches == [[11], [10, 20, 31]]  # when the first began, there was no other


def test_a_short_chain_gets_no_branches() -> None:
    session = branching_session()
    session.pacing = Pacing(window=4, branching=Branching(count=2, depth=2, min_chain=3))
    drafted(session, 10, 20)
    session.growing(1000)
    assert session.branches == []
    drafted(session, 30)
    session.growing(1000)
    assert len(session.branches) == 2


def test_an_accepted_branch_becomes_the_chain() -> None:
    session = branching_session(1)
    drafted(session, 10)
    chain, branch = session.growing(1000)
    session.extend(branch, [DraftToken(12)])
    session.extend(branch, [DraftToken(13)])
    session.extend(chain, [DraftToken(20)])
    assert session.take_unsent(0) == [Branch(None, 1, [10, 20]), Branch(None, 1, [11, 12, 13])]
    session.commit([11])
    assert session.chain == [12, 13]
    assert (session.num_branch_hits, session.num_wasted_tokens) == (1, 2)
    drafted(session, 14)
    assert session.take_unsent(5) == [Branch(4, 2, [14])]


def test_a_deep_branch_is_sent_in_portions() -> None:
    """A draft sends a deep branch (a long alternative) in portions while the branch grows.

    Sent only when complete, a branch would arrive after the rejection for which it is needed.
    """
    session = branching_session(1)
    session.pacing = Pacing(window=4, chunk=2, branching=Branching(count=1, depth=6))
    drafted(session, 10)
    _, branch = session.growing(1000)
    sent_tokens = []
    for token_id in range(12, 18):
        session.extend(branch, [DraftToken(token_id)])
        sent_tokens += [list(each.token_ids) for each in session.take_unsent(10) if each.token_ids[0] != 10]
    assert sent_tokens == [[11, 12, 13], [14, 15, 16], [17]]


def test_a_branch_that_arrives_too_late_is_not_begun() -> None:
    """A draft begins no branch (a second guess for a token) that would arrive after it is needed.

    Regression: at a round trip of 40 passes, 20 % of all messages were branches that arrived too late.
    """
    session = branching_session(1)
    session.pacing = Pacing(window=8, num_ahead=6, branching=Branching(count=1, depth=2))
    for token_id in range(10, 14):
        drafted(session, token_id)
        assert not session.branches, "the target decodes 6 tokens meanwhile, and a branch from here ends before"
    for token_id in range(14, 17):
        drafted(session, token_id)
    assert session.branches[0][:4] == [10, 11, 12, 13]


def test_a_step_of_a_lost_branch_is_dropped() -> None:
    session = branching_session(1)
    drafted(session, 10)
    _, branch = session.growing(1000)
    session.commit([10])
    session.extend(branch, [DraftToken(12)])
    assert (session.chain, session.branches) == ([], [])


class DoubtfulProposer:
    """Proposer that is unsure of all tokens: it drafts the sequence's length as token id, with 50 as second choice."""

    num_slots = 2
    num_branches = 2
    max_length = 100

    def __init__(self) -> None:
        self.steps: list[list[Draft]] = []

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        self.steps.append(list(drafts))
        return [[DraftToken(len(draft.token_ids), 50, 0.1)] for draft in drafts]


async def test_branches_of_all_sessions_share_steps() -> None:
    proposer = DoubtfulProposer()
    async with running(DraftEngine(proposer)) as engine:
        sessions = [engine.open([1, 2], SamplingParams()) for _ in range(2)]
        for session in sessions:
            engine.pace(session, Pacing(window=4, min_survival=1e-9, branching=Branching(count=2, depth=2)))
        await until(lambda: all(len(session.chain) == 4 for session in sessions))
        await until(lambda: all([len(path) for path in session.branches] == [3, 4] for session in sessions))
        assert sessions[0].branches == [[50, 3, 4], [2, 50, 4, 5]]
        widest = max(proposer.steps, key=len)
        assert [(draft.slot, draft.source_slot) for draft in widest] == [
            (0, None), (2, 0), (3, 0), (1, None), (4, 1), (5, 1),
        ]  # fmt: skip


async def test_without_room_for_branches_nothing_is_ranked() -> None:
    proposer = DoubtfulProposer()
    async with running(DraftEngine(proposer)) as engine:
        session = engine.open([1, 2], SamplingParams())
        engine.pace(session, Pacing(window=3))
        await until(lambda: len(session.chain) == 3)
        assert session.branches == []
        assert all(len(step) == 1 for step in proposer.steps)


SURE, UNSURE = 20.0, 0.05


class Blind(Confidence):
    """Estimate of acceptance that learns nothing: probability 1 for a token of margin `SURE`, 0.1 for any other."""

    def rate(self, token: DraftToken) -> float:
        return 1.0 if token.margin == SURE else 0.1

    def record(self, token: DraftToken, *, accepted: bool) -> None:
        pass


def session(pacing: Pacing) -> DraftSession:
    found = DraftSession(DraftedSequence([7]), confidence=Blind())
    found.enter(0)
    found.pacing = pacing
    return found


def draft(session: DraftSession, *margins: float) -> None:
    """Extend the chain by one token for each margin, unless the session wants no more."""
    for margin in margins:
        for path in session.growing(1000):
            session.extend(path, [DraftToken(10 + len(path.tokens), 5, margin)])


async def is_time_to_send(session: DraftSession) -> bool:
    try:
        await asyncio.wait_for(session.has_unsent(), timeout=0.001)
    except TimeoutError:
        return False
    return True


async def test_a_growing_chain_goes_out_in_chunks() -> None:
    it = session(Pacing(window=8, chunk=3))
    draft(it, SURE, SURE)
    assert not await is_time_to_send(it)
    draft(it, SURE)
    assert await is_time_to_send(it)
    assert [growth.token_ids for growth in it.take_unsent(0)] == [[10, 11, 12]]
    draft(it, SURE)
    assert not await is_time_to_send(it)
    it.pacing = replace(it.pacing, window=5)
    draft(it, SURE)
    assert await is_time_to_send(it), "the end of the window sends what is left"


async def test_a_doubtful_token_ends_the_first_message() -> None:
    """The first message of a proposal ends after a token that is unlikely to be accepted.

    Tokens after it gain less than the time for which the target would wait for them.
    """
    it = session(Pacing(window=8, chunk=8, step_s=0.001, round_s=0.01))
    draft(it, SURE)
    assert not await is_time_to_send(it)
    draft(it, UNSURE)
    assert await is_time_to_send(it)


async def test_hopeless_tokens_are_not_sent() -> None:
    it = session(Pacing(window=8, chunk=1, min_gain=0.2))
    draft(it, UNSURE)
    assert not await is_time_to_send(it)
    it.pacing = replace(it.pacing, min_gain=0.05)
    assert await is_time_to_send(it)


async def test_tokens_decoded_meanwhile_are_no_gain() -> None:
    it = session(Pacing(window=8, chunk=1, min_gain=0.1, num_ahead=3))
    draft(it, SURE, SURE, SURE)
    assert not await is_time_to_send(it)
    draft(it, SURE)
    assert await is_time_to_send(it)


async def test_a_chain_that_is_likely_wrong_is_not_extended() -> None:
    it = session(Pacing(window=8, chunk=1, min_survival=0.05))
    draft(it, UNSURE, SURE, UNSURE, SURE, SURE)
    assert len(it.chain) == 3  # 0.1, 0.1, 0.01
    it.commit([10, 11])
    draft(it, SURE)
    assert len(it.chain) == 2  # what is agreed is no longer a doubt
