"""How much a session's own past is trusted: by what came of matches of that length, and no longer than it lasts."""

from __future__ import annotations

import random

from inference.speculation.lookup import Lookup

PERIOD = [3, 1, 4, 1, 5, 9, 2, 6]


def test_what_comes_true_is_proposed_at_length() -> None:
    lookup, log = Lookup(), PERIOD * 3
    proposal = lookup.propose(log, 16)
    for _ in range(9):
        lookup.record(len(proposal), len(proposal))
        log += [*proposal, (PERIOD * 40)[len(log) + len(proposal)]]
        proposal = lookup.propose(log, 16)
        assert proposal == (PERIOD * 40)[len(log) : len(log) + len(proposal)]
    assert len(proposal) == 16


def test_what_never_comes_true_is_hardly_tried_and_not_given_up_for_good() -> None:
    """A plain text pays for tries: where one costs a twentieth of a pass, few passes of a hundred may have one."""
    rng, lookup, num_tried = random.Random(0), Lookup(), 0
    log = [rng.randrange(20) for _ in range(50)]
    for _ in range(400):
        proposal = lookup.propose(log, 16)
        tries = proposal if lookup.rate > 0.05 else []
        num_tried += len(tries)
        lookup.record(len(tries), 0)
        log.append(rng.randrange(20))
    assert 0 < num_tried < 400 * 0.3
    rate = lookup.rate
    for _ in range(300):
        lookup.record(0, 0)
    assert lookup.rate > rate


def test_a_match_is_judged_by_its_length() -> None:
    lookup = Lookup()
    log = [1, 2, 3, 1]
    for _ in range(20):
        lookup.propose(log, 4)
        lookup.record(4, 0)
    poor = lookup.rate
    lookup.propose([*PERIOD, *PERIOD], 4)
    assert lookup.rate > 0.5 > 0.05 > poor
