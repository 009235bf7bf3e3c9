"""A request may reuse the cached tokens that a slot still has, which saves time and changes no token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.commit import Commit, Opened
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.prefixes import Prefix, SlotChoice, choose_slot
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Decoder, Turn
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.model.slots import Array, Span
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.scheduling.draft_length import DraftLength
from specdec.inference.scheduling.pacing import Branching, Pacing
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support.answers import tokens
from tests.support.models import DEFAULT_VOCAB_SIZE, tiny_model
from tests.support.scripted import until

MAX_LENGTH = 96
NUM_TOKENS = 6
SAMPLED = SamplingParams(temperature=1.0, seed=7)


def torch_backend(*, seed: int = 1, num_slots: int = 3) -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=seed), num_slots=num_slots, max_length=MAX_LENGTH)


class Unforkable:
    """Slot backend that cannot copy slots; a pass that the test makes fail writes nonsense into the slots first."""

    def __init__(self, backend: TorchBackend) -> None:
        self.backend = backend
        self.num_failures = 0
        self.during: Callable[[], object] | None = None  # the next pass
        self.num_read = 0

    vocab_size = property(lambda self: self.backend.vocab_size)
    num_slots = property(lambda self: self.backend.num_slots)
    max_length = property(lambda self: self.backend.max_length)
    slot_bytes = property(lambda self: self.backend.slot_bytes)

    def forward(self, spans: Sequence[Span]) -> Array:
        during, self.during = self.during, None
        if during is not None:
            during()
        if self.num_failures:
            self.num_failures -= 1
            self.backend.forward([replace(span, token_ids=[2] * len(span.token_ids)) for span in spans])
            raise RuntimeError("flicker")
        self.num_read += sum(len(span.token_ids) for span in spans)
        return self.backend.forward(spans)


class Forkable(Unforkable):
    """Slot backend that can copy slots; a pass or copy that the test makes fail writes nonsense first."""

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        self.backend.fork(source_slot, destination_slot, start, end)
        if self.num_failures:
            self.num_failures -= 1
            self.backend.forward([Span(destination_slot, start, [2] * (end - start), 0)])
            raise RuntimeError("flicker")


# Choice of a slot for a sequence.


def test_a_conversation_goes_on_where_it_was_and_shared_prefixes_are_copied() -> None:
    assert choose_slot([2, 0, 1], {0: 50, 1: 40}, {0: 10, 1: 40}, can_copy=True) == SlotChoice(1, 1, 40)
    assert choose_slot([2, 0, 1], {0: 500, 1: 400}, {0: 100, 1: 100}, can_copy=True) == SlotChoice(2, 1, 100)


def test_without_copies_a_short_match_overwrites_nothing_long() -> None:
    free, left = [0, 1], {0: 30, 1: 500}
    assert choose_slot(free, left, {1: 100}, can_copy=False) == SlotChoice(0, 0)
    assert choose_slot(free, left, {1: 300}, can_copy=False) == SlotChoice(1, 1, 300)
    assert choose_slot([1], {1: 500}, {1: 100}, can_copy=False) == SlotChoice(1, 1, 100), "there is no other"


def test_empty_slots_go_first_then_the_oldest() -> None:
    assert choose_slot([1, 2, 0], {1: 30, 0: 50}, {}, can_copy=True) == SlotChoice(2, 2)
    assert choose_slot([1, 2, 0], {1: 30, 2: 10, 0: 50}, {}, can_copy=True) == SlotChoice(1, 1)


slots = st.integers(0, 5)


@given(st.lists(slots, min_size=1, max_size=6, unique=True), st.dictionaries(slots, st.integers(1, 50)), st.data())
def test_of_what_can_be_had_the_longest_is_taken(free: list[int], held: dict[int, int], data: st.DataObject) -> None:
    shared = {slot: data.draw(st.integers(1, length)) for slot, length in held.items() if data.draw(st.booleans())}
    left = {slot: length for slot, length in held.items() if slot in free}
    place = choose_slot(free, left, shared, can_copy=True)
    assert place.slot in free
    assert place.num_tokens == max(shared.values(), default=0) == shared.get(place.source_slot, 0)
    alone = choose_slot(free, left, {slot: n for slot, n in shared.items() if slot in free}, can_copy=False)
    assert alone.slot == alone.source_slot
    assert alone.num_tokens == shared.get(alone.slot, 0)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6), st.sampled_from(["", "a"]))
def test_a_shared_prefix(one: list[int], other: list[int], salt: str) -> None:
    ours, theirs = one * 300, other * 300  # longer than what is compared at once
    expected = 0
    while not salt and expected < min(len(ours), len(theirs)) and ours[expected] == theirs[expected]:
        expected += 1
    assert Prefix(ours, len(ours), salt).num_shared(Prefix(tuple(theirs), len(theirs))) == expected


# Engines that reuse prefixes.


async def run(engine: TargetEngine, request: GenerationRequest, leaves_after: int | None = None) -> list[Commit]:
    return (await cached(engine, request, leaves_after))[1]


async def cached(
    engine: TargetEngine, request: GenerationRequest, leaves_after: int | None = None
) -> tuple[int, list[Commit]]:
    """Send a request; return its number of cached prompt tokens and its commits.

    If `leaves_after` is set, the client leaves after one commit more than that.
    """
    commits: list[Commit] = []
    num_cached = 0
    async with aclosing(engine.generate(request)) as stream:
        async for event in stream:
            if isinstance(event, Opened):
                num_cached = event.num_cached_tokens
                continue
            commits.append(event)
            if leaves_after is not None and len(commits) > leaves_after:
                break
    return num_cached, commits


def request(prompt: Sequence[int], **fields: Any) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), **{"max_new_tokens": NUM_TOKENS, **fields})


PROMPT = tuple(range(20, 60))


@pytest.mark.parametrize("kind", [Forkable, Unforkable])
async def test_the_next_turn_reads_what_is_new(kind: type[Unforkable]) -> None:
    backend = kind(torch_backend())
    async with running(TargetEngine(SlotDecoder(backend))) as engine:
        first_cached, first = await cached(engine, request(PROMPT))
        backend.num_read = 0
        turn = request([*PROMPT, *tokens(first), 5, 6, 7])
        second_cached, second = await cached(engine, turn)
    num_cached = len(PROMPT) + NUM_TOKENS - 1  # no pass has read the last token
    assert (first_cached, second_cached) == (0, num_cached)
    assert backend.num_read == 4 + NUM_TOKENS - 1
    assert tokens(second) == plain(turn)


async def test_one_token_is_always_computed() -> None:
    async with (
        running(TargetEngine(SlotDecoder(Forkable(torch_backend())))) as engine,
        aclosing(engine.generate(request(PROMPT, max_new_tokens=40))) as busy,
    ):
        await anext(busy)
        found = [await cached(engine, request(prompt)) for prompt in (PROMPT, PROMPT[:10])]
    assert [num_cached for num_cached, _ in found] == [39, 9]
    again, shorter = [commits for _, commits in found]
    assert (tokens(again), tokens(shorter)) == (plain(request(PROMPT)), plain(request(PROMPT[:10])))


@pytest.mark.parametrize(
    ("fields", "num_cached"), [({"cache_salt": "b"}, 0), ({"cache_salt": "a"}, 39), ({"prompt_logprobs": 0}, 0)]
)
async def test_prefixes_are_cached_by_salt_and_for_no_scored_prompt(fields: dict[str, Any], num_cached: int) -> None:
    async with running(TargetEngine(SlotDecoder(torch_backend()))) as engine:
        for salt in ("a", ""):
            await run(engine, request(PROMPT, cache_salt=salt))
        found, _ = await cached(engine, request(PROMPT, **fields))
    assert found == num_cached


async def test_without_caching_nothing_is_left() -> None:
    proposer = ModelProposer(drafting := Forkable(torch_backend(seed=2)))
    decoder = SpeculativeDecoder(SlotDecoder(Forkable(torch_backend())), proposer)
    async with running(TargetEngine(decoder, EngineLimits(gamma=2, prefix_caching=False))) as engine:
        read = []
        for _ in range(2):
            assert (await cached(engine, request(PROMPT)))[0] == 0
            read.append(drafting.num_read)
    assert read[1] == 2 * read[0], "the draft has forgotten it too"


async def test_a_cancelled_prompt_keeps_the_parts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", 16)
    backend = Forkable(torch_backend())
    async with running(TargetEngine(SlotDecoder(backend))) as engine:
        loop, session = asyncio.get_running_loop(), engine.open(request(PROMPT))

        async def give_up() -> None:
            engine.close(session)

        def second_pass() -> None:
            asyncio.run_coroutine_threadsafe(give_up(), loop).result(30)

        backend.during = lambda: setattr(backend, "during", second_pass)
        await until(lambda: engine.num_running == 0 and backend.num_read > 16)
        num_cached, commits = await cached(engine, request(PROMPT))
    assert num_cached == 16, "what a pass writes after its session has left is not counted"
    assert tokens(commits)[:1] == plain(request(PROMPT))[:1]


async def test_leaving_during_a_failed_pass_leaves_no_prefix() -> None:
    """The slot of a client that left during a failed pass is not reused: the pass may have written anything there."""
    backend = Forkable(torch_backend())
    async with running(TargetEngine(SlotDecoder(backend))) as engine:
        stream = engine.generate(request(PROMPT, max_new_tokens=40))
        await anext(stream)
        loop = asyncio.get_running_loop()
        backend.num_failures, backend.during = (
            1,
            lambda: asyncio.run_coroutine_threadsafe(stream.aclose(), loop).result(30),
        )
        await until(lambda: engine.num_running == 0 and not backend.num_failures)
        num_cached, _ = await cached(engine, request(PROMPT))
    assert num_cached == 0


def test_a_draft_distrusts_positions_after_a_failed_pass() -> None:
    backend = Forkable(torch_backend(seed=2))
    proposer = ModelProposer(backend)
    proposer.extend([Draft(0, PROMPT, SamplingParams(), limit=1)])
    backend.num_failures = 1
    with pytest.raises(RuntimeError):
        proposer.extend([Draft(0, [*PROMPT[:20], 3, 4, 5, 6], SamplingParams(), limit=1)])
    assert [*proposer._held[0]] == [*PROMPT[:20]]
    assert_holds(backend.backend, 0, proposer._held[0], torch_backend(seed=2, num_slots=1))


class Rereading(Unforkable):
    """Slot backend that decides whether to reuse a slot's tokens; if not, the whole prompt is read again."""

    max_pass_tokens, prompt_chunk_tokens, pays = 8, 0, False

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        return self.pays and num_tokens - num_held < 3


async def test_a_backend_that_rereads_faster_is_asked() -> None:
    backend = Rereading(torch_backend())
    async with running(TargetEngine(SlotDecoder(backend))) as engine:
        found = []
        for backend.pays, end in ((False, 40), (False, 40), (True, 40), (True, 36)):
            found.append((await cached(engine, request([*PROMPT[:end], *range(3, 43 - end)])))[0])
    assert found == [0, 0, 39, 0]


# Whatever happens: the tokens are those of a fresh engine, and what is held is what a fresh prefill would write.


@dataclass(frozen=True)
class Asked:
    """One request of a history.

    Attributes:
        parent: distance, in requests, to the earlier request that this one continues; 0 if it continues none.
        keep: share of the parent's prompt and output that this request begins with.
        extra: token ids of the prompt after these.
        salt: cache salt; requests share cached tokens only if their salts are equal.
        sampled: whether tokens are sampled; else decoding is greedy.
        leaves_after: the client leaves after one commit more than this; None if it reads to the end.
        scored: whether log-probabilities of the prompt are wanted.
        beside: whether the request is sent while the one before it still runs.
        fails: whether the next pass or copy fails, unless the request is sent beside another.
    """

    parent: int
    keep: float
    extra: tuple[int, ...]
    salt: str
    sampled: bool
    leaves_after: int | None
    scored: bool
    beside: bool
    fails: bool


asked = st.builds(
    Asked,
    parent=st.integers(0, 3),
    keep=st.sampled_from([0.3, 0.7, 1.0, 1.0]),
    extra=st.lists(st.integers(2, 4), min_size=1, max_size=5).map(tuple),
    salt=st.sampled_from(["", "", "a"]),
    sampled=st.booleans(),
    leaves_after=st.sampled_from([None, None, 0, 2]),
    scored=st.sampled_from([False, False, False, True]),
    beside=st.booleans(),
    fails=st.sampled_from([False, False, True]),
)
REFERENCE: list[TorchBackend] = []


def reference() -> TorchBackend:
    """Return a separate backend with the target's model."""
    if not REFERENCE:
        REFERENCE.append(torch_backend(num_slots=1))
    return REFERENCE[0]


def plain(wanted: GenerationRequest) -> list[int]:
    """Return the tokens of the target alone, one per pass, from an empty slot; computed once per request."""
    decoder, token_ids, start = SlotDecoder(reference()), list(wanted.prompt_token_ids), 0
    while len(token_ids) < len(wanted.prompt_token_ids) + wanted.max_new_tokens:
        (verdict,) = decoder.step([Turn(0, start, tuple(token_ids), wanted.sampling)])
        start = len(token_ids)
        token_ids += verdict.token_ids
    return token_ids[len(wanted.prompt_token_ids) :]


def prompts(history: Sequence[Asked]) -> list[GenerationRequest]:
    """Return the history's requests; each may continue an earlier one and the target's answer to it."""
    requests: list[GenerationRequest] = []
    for number, each in enumerate(history):
        before: list[int] = []
        if 0 < each.parent <= number:
            parent = requests[number - each.parent]
            before = [*parent.prompt_token_ids, *plain(parent)][: MAX_LENGTH - 20]
        kept = before[: round(each.keep * len(before))]
        sampling = SAMPLED if each.sampled else SamplingParams()
        scored = 0 if each.scored else None
        wanted = request([*kept, *each.extra], sampling=sampling, cache_salt=each.salt, prompt_logprobs=scored)
        requests.append(wanted)
    return requests


async def play(engine: TargetEngine, backend: Unforkable, history: Sequence[Asked]) -> None:
    """Send all requests of a history; check that each answer, or its read part, is that of the target alone."""
    requests = prompts(history)
    running: list[asyncio.Task[tuple[int, list[Commit]]]] = []
    for each, wanted in zip(history, requests, strict=True):
        if not each.beside:  # a session that fails twice ends
            await asyncio.gather(*running)
            backend.num_failures = int(each.fails)
        running.append(asyncio.create_task(cached(engine, wanted, each.leaves_after)))
    for (num_cached, commits), each, wanted in zip(await asyncio.gather(*running), history, requests, strict=True):
        output = tokens(commits)
        assert output == plain(wanted)[: len(output)]
        assert each.leaves_after is not None or len(output) == NUM_TOKENS
        assert num_cached < len(wanted.prompt_token_ids)
        assert not each.scored or num_cached == 0


def assert_holds(backend: TorchBackend, slot: int, token_ids: Sequence[int], fresh: TorchBackend) -> None:
    """Assert that `slot` holds `token_ids`: it gives the logits of slot 0 of `fresh`, which reads them anew."""
    logits = backend.forward([Span(slot, len(token_ids), [9], 1)])
    expected = fresh.forward([Span(0, 0, [*token_ids, 9], 1)])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def decoder_of(kind: str) -> tuple[Decoder, Unforkable]:
    backend = Unforkable(torch_backend()) if kind == "unforkable" else Forkable(torch_backend())
    if kind != "fused":
        return SlotDecoder(backend), backend
    draft = ModelProposer(torch_backend())
    return SpeculativeDecoder(SlotDecoder(backend), draft, DraftLength()), backend


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["forkable", "unforkable", "fused"])
def test_no_history_changes_a_token(kind: str, caching: bool) -> None:
    decoder, backend = decoder_of(kind)

    @settings(max_examples=8 if caching else 3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(asked, min_size=2, max_size=7))
    def check(history: list[Asked]) -> None:
        asyncio.run(one(history))

    async def one(history: list[Asked]) -> None:
        """Run one history on a new engine, which must not reuse tokens that earlier histories left in the slots."""
        engine = TargetEngine(decoder, EngineLimits(gamma=3, prefix_caching=caching))
        engine.start()
        try:
            await play(engine, backend, history)
            await until(lambda: engine.num_running == 0)
            await engine._thread.run(lambda: None)  # the pass of the session that left is over too
        finally:
            backend.num_failures = 0
            await engine.stop()
        left = engine._admission._left
        assert caching or not left
        for slot, prefix in left.items():
            assert_holds(backend.backend, slot, prefix.token_ids[: prefix.length], reference())

    check()


# The draft's slots: a sequence may have ended in the slot of a branch.


class Doubtful(ModelProposer):
    """Draft model that is unsure of all its tokens (small margins), so that branches begin at every token."""

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Return tokens with a small margin, each with the next id as its runner-up."""
        return [
            None if each is None else [DraftToken(t.token_id, (t.token_id + 1) % DEFAULT_VOCAB_SIZE, 0.1) for t in each]
            for each in super().extend(drafts, ranked=ranked)
        ]


BRANCHING = Pacing(window=3, min_survival=1e-9, branching=Branching(count=2, depth=2))


async def drafted(
    engine: DraftEngine, prompt: Sequence[int], *, salt: str, takes_branch: bool
) -> tuple[int, list[int]]:
    """Draft for a sequence, commit tokens of its chain or of a branch; return its slot and the committed tokens."""
    session = engine.open(prompt, SamplingParams(), cache_salt=salt)
    engine.pace(session, BRANCHING)
    await until(lambda: len(session.chain) == 3)
    await until(lambda: len(session.branches) == 2 and all(len(path) >= 3 for path in session.branches))
    engine.commit(session, session.branches[0][:2] if takes_branch else session.chain[:2])
    await until(lambda: len(session.chain) == 3)
    slot, committed = session._path.slot, list(session.committed)
    engine.close(session)
    return slot, committed


async def test_a_draft_reuses_the_slot_of_a_branch() -> None:
    backend = Forkable(torch_backend(seed=2, num_slots=6))
    proposer = Doubtful(backend, num_branches=2)
    async with running(DraftEngine(proposer)) as engine:
        slot, committed = await drafted(engine, PROMPT, salt="", takes_branch=True)
        assert slot >= proposer.num_slots, "the branch has become the chain, in its own slot"
        backend.num_read = 0
        session = engine.open([*committed, 5], SamplingParams())
        engine.pace(session, Pacing(window=1))
        await until(lambda: len(session.chain) == 1)
        engine.close(session)
        assert backend.num_read < 10, "a step for who has left may be among them"
        other = engine.open([*committed, 5], SamplingParams(), cache_salt="b")
        engine.pace(other, Pacing(window=1))
        await until(lambda: len(other.chain) == 1)
    assert backend.num_read >= len(committed)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(asked, st.booleans()), min_size=2, max_size=5))
def test_a_draft_knows_what_its_slots_hold(history: list[tuple[Asked, bool]]) -> None:
    backend = Forkable(torch_backend(seed=2, num_slots=6))
    proposer = Doubtful(backend, num_branches=2)
    fresh = torch_backend(seed=2, num_slots=1)

    async def play_drafts() -> None:
        async with running(DraftEngine(proposer)) as engine:
            sequences: list[list[int]] = []
            for number, (each, takes_branch) in enumerate(history):
                before = sequences[number - each.parent] if 0 < each.parent <= number else []
                prompt = [*before[: round(each.keep * len(before))], *each.extra]
                backend.num_failures = int(each.fails)
                _, committed = await drafted(engine, prompt, salt=each.salt, takes_branch=takes_branch)
                sequences.append(committed)
            await engine._thread.run(lambda: None)  # the step of the session that left is over too

    asyncio.run(play_drafts())
    for slot, held in enumerate(proposer._held):
        if held:
            assert_holds(backend.backend, slot, held, fresh)
