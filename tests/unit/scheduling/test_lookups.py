"""Sessions look tokens up in each pass while passes verify some of them, and rarely if many sessions verify none."""

from __future__ import annotations

import pytest

from specdec.inference.scheduling.lookups import Lookups


def looking(lookups: Lookups, num_sessions: int, num_passes: int, *, num_verified: int = 0) -> list[bool]:
    """Run passes in which a lookup finds 8 tokens; return for each pass whether tokens were looked up in it."""
    looked = []
    for _ in range(num_passes):
        looked.append(lookups.are_due)
        found = 8 * lookups.are_due
        lookups.passed(num_sessions, found, min(found, num_verified))
    return looked


@pytest.mark.parametrize(("num_sessions", "longest"), [(1, 0), (3, 0), (4, 1), (16, 4), (64, 16), (256, 64)])
def test_passes_without_lookups_grow_to_a_quarter_of_the_sessions(num_sessions: int, longest: int) -> None:
    lookups = Lookups()
    looking(lookups, num_sessions, 400)
    text = "".join("x" if each else "." for each in looking(lookups, num_sessions, 400))
    assert max(map(len, text.strip(".").split("x"))) == longest


def test_one_verified_token_lets_all_passes_look_again() -> None:
    lookups = Lookups()
    looking(lookups, 64, 100)
    looking(lookups, 64, 17, num_verified=1)
    assert all(looking(lookups, 64, 100, num_verified=1))


def test_passes_in_which_nothing_is_found_or_a_draft_is_verified_make_lookups_no_rarer() -> None:
    lookups = Lookups()
    for _ in range(100):
        lookups.passed(64, 0, 0)
        assert lookups.are_due
    assert lookups.share == 1.0


def test_the_share_follows_what_passes_verify() -> None:
    lookups = Lookups()
    for _ in range(200):
        lookups.passed(1, 8, 2)
    assert lookups.share == pytest.approx(0.25, abs=1e-3)
