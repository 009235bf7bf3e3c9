"""Verification of a proposal: draft tokens are accepted as long as they equal the target's own choices."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.inference.model.decoder import Verdict


def verify(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    """Compare a proposal with the target's own choices.

    Both sides sample with the same random numbers (specdec.inference.sampling), so accepting exactly the agreeing
    prefix leaves the target's own sequence: Daliri, Musco, Suresh, arXiv 2408.07978.

    Args:
        chosen: the target's token after each prefix of the proposal: chosen[i] follows proposal[:i].
        proposal: draft token ids; one fewer than chosen.

    Returns:
        The accepted tokens followed by one of the target's own: the correction, or the bonus token if all agreed.
    """
    if len(chosen) != len(proposal) + 1:
        raise ValueError(f"{len(chosen)} chosen tokens do not fit {len(proposal)} proposed ones")
    num_accepted = 0
    while num_accepted < len(proposal) and chosen[num_accepted] == proposal[num_accepted]:
        num_accepted += 1
    rejected = tuple(proposal[num_accepted:])
    return Verdict(tuple(chosen[: num_accepted + 1]), len(proposal), num_accepted, rejected_token_ids=rejected)
