"""Answers in a comparison may differ where two tokens score almost equally (a near-tie); else they must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.comparison.plan.config import Contender, PromptSet, Topology, WorkloadConfig
from specdec.comparison.plan.datasets import Conversation
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.report.agreement import check_agreement
from specdec.comparison.run.client import Step
from specdec.comparison.run.http_client import http_client
from specdec.comparison.run.ties import margin_of, with_margins
from tests.support.foreign import ScriptedServer, serving
from tests.support.samples import config

STEPS = [
    Step(0, (("The", -0.1), ("A", -3.0))),
    Step(3, ((" cat", -0.7), (" c", -0.75), (" dog", -0.8), (" car", -5.0))),
    Step(7, ((" sat", -0.2), (".", -2.0))),
]
ANSWER = "The cat sat"


@pytest.mark.parametrize(
    ("expected", "actual", "margin"),
    [
        ("The cat sat", "The dog ran", 0.1),  # the reference goes on as it did
        ("The dog ran", "The cat sat", 0.1),  # the other server was asked
        ("The cat sat", "The car ran", 0.05),  # as " c" and "ar", which is more probable than " car"
        ("The cat sat", "A cat sat", 2.9),
        ("The cat sat", "The bird sat", None),  # not among the best
        ("The dog ran", "The bird ran", None),  # the server goes on as neither did
        ("The cat sat", "The cat", None),  # it has ended
        ("This", "That", None),
        ("", "The", None),
    ],
)
def test_the_margin_is_that_of_the_tokens_at_which_both_part(expected: str, actual: str, margin: float | None) -> None:
    found = margin_of(ANSWER, STEPS, expected, actual)
    assert found == (None if margin is None else pytest.approx(margin))


def test_an_answer_that_parted_earlier_this_time_is_no_evidence() -> None:
    assert margin_of("Our cat sat", STEPS, "The cat sat", "The dog ran") is None


class Scripted:
    """Client whose server answers a prompt with (`text`, its log-probabilities `steps`); keeps prompts in `asked`."""

    def __init__(self, text: str = "", steps: list[Step] | None = None) -> None:
        self._found = text, steps or []
        self.asked: list[str] = []

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        self.asked.append(prompt)
        return self._found


BASE, SD = (Contender(Topology.ENDPOINT, endpoint=name) for name in ("Base", "SD"))


def answered(contender: Contender, *texts: str) -> Sample:
    records = (RequestRecord(index, 0.0, 3, (), (), text=text, model_id="m") for index, text in enumerate(texts))
    return Sample(Cell(contender, "structured", 0.0, 1), 0, tuple(records))


@pytest.mark.parametrize("silent", [BASE, SD])
async def test_either_server_is_asked_once_for_each_prompt_that_parted(silent: Contender, tmp_path: Path) -> None:
    """For each prompt with different answers, the baseline's server is asked once for its log-probabilities.

    If it has none, the other server is asked.

    Regression: the Kubernetes job `measure` failed at any near-tie, since a graph that chooses tokens on the
    device has no scores.
    """
    clients: Any = {BASE: Scripted(ANSWER, STEPS), SD: Scripted(ANSWER, STEPS)} | {silent: Scripted()}
    parted = [answered(SD, "The dog ran", "same"), answered(SD, "The dog ran", "same")]
    found = await with_margins(config(tmp_path), clients, [answered(BASE, ANSWER, "same"), *parted])
    assert [record.margin for sample in found for record in sample.records] == [
        *(None, None, pytest.approx(0.1), None, pytest.approx(0.1), None)
    ]
    assert clients[BASE].asked == ["1 2 3"]
    assert clients[SD].asked == (["1 2 3"] if silent is BASE else [])
    agreement = check_agreement(found, near_tie=0.25)
    assert (agreement.holds, len(agreement.near_ties)) == (True, 2)
    assert "same tokens but for near-ties: 2 of 6 answers part at one" in str(agreement)
    agreement = check_agreement(found, near_tie=0.05)
    assert (agreement.holds, len(agreement.differences)) == (False, 2)
    assert "0.1 apart in log-probability" in str(agreement.differences[0])


async def test_no_scores_are_requested_for_conversations(tmp_path: Path) -> None:
    workload = WorkloadConfig((PromptSet("structured", (Conversation(turns=("1", "2")),)),))
    clients: Any = {BASE: Scripted(ANSWER, STEPS)}
    samples = [answered(BASE, ANSWER), answered(SD, "The dog ran")]
    found = await with_margins(config(tmp_path, workload=workload), clients, samples)
    assert found[1].records[0].margin is None
    assert not clients[BASE].asked


async def scored_over_http(answer: object) -> tuple[str, list[Step], dict[str, Any]]:
    """Return (text, steps) that an HTTP client reads from this answer, and the body of the client's request."""
    server = ScriptedServer(lambda _: (200, "application/json", json.dumps(answer)))
    workload = WorkloadConfig((PromptSet("kind", ("text",)),))
    async with serving(server), http_client(Endpoint("a", server.url), workload) as client:
        return *await client.scored("text"), server.bodies[-1]


async def test_openai_gives_tokens_in_parallel_lists() -> None:
    scores = {
        "tokens": ["The", " cat"],
        "token_logprobs": [-0.1, -0.7],
        "top_logprobs": [{"The": -0.1, "A": -3.0}, {" cat": -0.7, " dog": -0.8}],
        "text_offset": [0, 3],
    }
    text, steps, asked = await scored_over_http({"choices": [{"text": "The cat", "logprobs": scores}]})
    assert margin_of(text, steps, "The cat", "The dog") == pytest.approx(0.1)
    assert (asked["logprobs"], asked["stream"], asked["prompt"]) == (5, False, "text")


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [{"text": "The", "logprobs": None}]}])
async def test_a_server_without_log_probabilities_is_no_failure(answer: object) -> None:
    assert (await scored_over_http(answer))[:2] == ("", [])


async def test_a_server_that_has_ended_is_not_asked(tmp_path: Path) -> None:
    clients: Any = {SD: Scripted(ANSWER, STEPS)}
    before, samples = [answered(BASE, ANSWER)], [answered(SD, "The dog ran")]
    (found,) = await with_margins(config(tmp_path), clients, samples, before)
    assert found.records[0].margin == pytest.approx(0.1)
