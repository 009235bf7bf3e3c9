"""Earlier answers as drafts: that to the same prompt is proposed first, memory is bounded, accounts stay apart."""

from __future__ import annotations

import random
import tracemalloc

from specdec.inference.caller import Caller
from specdec.inference.speculation.answers import KeptAnswers, Origin
from specdec.inference.speculation.lookup import FIRST_TRY

ANSWER = [*range(100, 140)]
PROMPT = (1, 2, 3)


def test_the_same_prompt_gets_its_answer_from_the_first_token_on() -> None:
    kept = KeptAnswers(1 << 20)
    kept.add(Origin("a", PROMPT), ANSWER)
    kept.add(Origin("a", (9, 9)), ANSWER[::-1])
    lookup = kept.lookup(Origin("a", PROMPT), (), 0)
    assert lookup.propose([*PROMPT], 10) == ANSWER[:10]
    assert lookup.is_guided
    assert not lookup.is_prediction


def test_the_answer_with_the_same_seed_comes_first() -> None:
    kept = KeptAnswers(1 << 20)
    for seed in range(4):
        kept.add(Origin("a", PROMPT, seed), [seed] * 20)
    for seed, expected in ((1, 1), (3, 3), (77, 3)):
        found = kept.lookup(Origin("a", PROMPT, seed), (), 0).propose([*PROMPT], 20)
        assert found == [expected] * (20 if seed == expected else FIRST_TRY)  # with another seed it may be another one


def test_another_prompt_gets_the_longest_match() -> None:
    kept = KeptAnswers(1 << 20)
    kept.add(Origin("a", PROMPT), ANSWER)
    lookup = kept.lookup(Origin("a", (50, 51)), (), 0)
    assert lookup.propose([50, 51], 8) == []
    log = [50, 51, *ANSWER[10:20]]
    found = lookup.propose(log, 8)
    assert found
    assert found == ANSWER[20:][: len(found)]


def test_no_owner_gets_another_ones_answers() -> None:
    """Kept answers are not shared between accounts, even if these share cached prefixes, nor between cache salts."""
    group = {"one": "team", "two": "team"}
    one, two = Caller("one", prefix_groups=group), Caller("two", prefix_groups=group)
    owners = [one.owner(""), two.owner(""), one.owner("salt"), Caller().owner(""), Caller().owner("salt")]
    assert one.cache_salt("") == two.cache_salt("")
    assert len({*owners}) == len(owners)
    kept = KeptAnswers(1 << 20)
    kept.add(Origin(owners[0], PROMPT), ANSWER)
    for owner in owners[1:]:
        lookup = kept.lookup(Origin(owner, PROMPT), (), 0)
        assert lookup.propose([*PROMPT], 8) == []
        assert lookup.propose([*PROMPT, *ANSWER[:20]], 8) == []


def test_it_stays_within_its_size() -> None:
    """Memory stays below the limit: the newest answers are kept, and accounts without any answer take none."""
    rng, size = random.Random(2), 1 << 19
    kept = KeptAnswers(size)
    tracemalloc.start()
    for number in range(240):
        kept.add(Origin(f"owner {number % 40}", (number,)), [rng.randrange(30_000) for _ in range(rng.randrange(400))])
        assert kept.num_bytes <= size
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 4 < taken < size
    kept.add(Origin("newest", PROMPT), ANSWER)
    assert kept.lookup(Origin("newest", PROMPT), (), 0).propose([*PROMPT], 4) == ANSWER[:4]
    assert not kept.lookup(Origin("owner 0", (0,)), (), 0).propose([0], 4)


def test_an_answer_beyond_the_size_leaves_nothing() -> None:
    kept = KeptAnswers(4096)
    kept.add(Origin("a", PROMPT), [*range(5000)])
    assert kept.num_bytes == 0
    assert not kept.lookup(Origin("a", PROMPT), (), 0).guides


def test_a_broken_off_answer_does_not_replace_the_whole_one() -> None:
    kept = KeptAnswers(1 << 20)
    kept.add(Origin("a", PROMPT), ANSWER)
    num_bytes = kept.num_bytes
    kept.add(Origin("a", PROMPT), ANSWER[:5])
    kept.add(Origin("a", PROMPT), ANSWER)
    assert kept.num_bytes == num_bytes
    assert kept.lookup(Origin("a", PROMPT), (), 0).propose([*PROMPT, *ANSWER[:30]], 8) == ANSWER[30:38]


def test_an_answer_that_is_dropped_meanwhile_proposes_nothing() -> None:
    """A session that gets draft tokens from a kept answer goes on without them once that answer is dropped."""
    kept = KeptAnswers(64 * 1024)
    kept.add(Origin("a", PROMPT), ANSWER)
    lookup = kept.lookup(Origin("a", PROMPT), (), 0)
    assert lookup.propose([*PROMPT], 4) == ANSWER[:4]
    for number in range(20):
        kept.add(Origin("a", (number, 7)), [*range(1000 + number, 1500 + number)])
    assert lookup.propose([*PROMPT, *ANSWER[:4]], 4) == []
