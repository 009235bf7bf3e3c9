"""Test of answers that vLLM's engine core keeps as drafts (`specdec target --engine vllm --replay SIZE`)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.inference.caller import Caller, request_context
from specdec.inference.commit import Commit
from specdec.inference.config import ServerConfig
from specdec.inference.serving.assembly import running
from specdec.inference.vllm.options import VllmModel
from tests.support.engine_contract import completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, MAX_LENGTH, Pair

pytestmark = pytest.mark.release


def counts(commits: Sequence[Commit]) -> tuple[int, int]:
    """Return the number of verified draft tokens, and that of accepted tokens that came from kept answers."""
    return sum(each.num_draft_tokens for each in commits), sum(each.own.num_lookup_accepted for each in commits)


async def test_an_answer_is_a_draft_of_the_next_equal_one_in_its_account_and_salt(pair: Pair) -> None:
    """If a request is repeated with the same account and cache salt, its first answer is the draft of the second.

    The tokens are the same. A request of another account or with another salt gets no draft tokens.
    """
    from specdec.inference.serving.vllm_target import vllm_engine

    groups = {"one": "team", "two": "team"}
    asked = [("one", ""), ("one", ""), ("two", ""), ("one", "salt"), ("one", "")]
    request = wanted("noise", max_new_tokens=60)
    async with running(onnx_engine(pair.target, MAX_LENGTH)) as onnx:
        right, _ = await completed(onnx, request)
    model, got = VllmModel(pair.target, FLAGS, gamma=16), []
    async with vllm_engine(model, ServerConfig(max_waiting=2, lookup=False, replay=1.0)) as (held, _):
        for number, (who, salt) in enumerate(asked):
            with request_context(Caller(who, prefix_groups=groups), str(number)):
                tokens, commits = await completed(held.engine, wanted("noise", max_new_tokens=60, cache_salt=salt))
            assert tokens == right
            got.append(counts(commits))
    assert [got[0], got[2], got[3]] == [(0, 0)] * 3
    assert min(got[1][1], got[4][1]) > 50
