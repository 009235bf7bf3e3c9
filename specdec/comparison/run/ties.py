"""Margins: differences in log-probability of the two tokens at which answers part; servers are asked after the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.comparison.plan.config import ComparisonConfig, Contender
from specdec.comparison.plan.grid import Sample
from specdec.comparison.run.client import Step
from specdec.comparison.run.connections import Clients
from specdec.comparison.run.pairs import Pair, first_difference, pairs


async def with_margins(
    config: ComparisonConfig, clients: Clients, samples: Sequence[Sample], before: Sequence[Sample] = ()
) -> list[Sample]:
    """Return the samples; each record that differs from its reference gets the margin at the first difference.

    The margin is the difference in log-probability of the two tokens there; None if no server reports it.

    Args:
        clients: clients of the servers to ask for log-probabilities.
        before: earlier samples, with the reference answers.
    """
    asking = _Asking(config, clients)
    margins = {
        id(pair.record): await asking.margin(pair)
        for pair in pairs([*before, *samples], equal_weights=config.trusts_weights)
        if pair.parting is not None and pair.sample.cell.contender in clients
    }
    return [
        replace(sample, records=tuple(replace(record, margin=margins.get(id(record))) for record in sample.records))
        for sample in samples
    ]


class _Asking:
    """Sender of requests for log-probabilities, which asks each server at most once about each prompt."""

    def __init__(self, config: ComparisonConfig, clients: Clients) -> None:
        self._prompts = {each.kind: each.prompts for each in config.workload.prompt_sets}
        self._clients = clients
        self._answers: dict[tuple[Contender, str], tuple[str, list[Step]]] = {}

    async def margin(self, pair: Pair) -> float | None:
        """Return the difference in log-probability of the two tokens at which a pair of answers part.

        None for conversations, or if neither of the two servers reports it.
        """
        prompts = self._prompts[pair.sample.cell.kind]
        both = [it.cell.contender for it in (pair.reference, pair.sample) if it.cell.contender in self._clients]
        for contender in both if all(isinstance(it, str) for it in prompts) else ():
            key = contender, str(prompts[pair.record.prompt_index])
            if key not in self._answers:
                self._answers[key] = await self._clients[key[0]].scored(key[1])
            if (margin := margin_of(*self._answers[key], pair.expected.text, pair.record.text)) is not None:
                return margin
        return None


def margin_of(text: str, steps: Sequence[Step], expected: str, actual: str) -> float | None:
    """Return the difference in log-probability of the two tokens at which two answers part; None: unknown.

    Args:
        text, steps: text and tokens of a server's third answer to the same prompt. The difference is known only if this
            answer agrees with exactly one of the two where they part.
        expected, actual: texts of the two answers.
    """
    parting = first_difference(expected, actual)
    step = next((step for step in reversed(steps) if parting and step.offset <= parting[0]), None)
    if step is None or text[: step.offset] != expected[: step.offset]:
        return None
    (own, logprob), *others = step.best
    rests = [rest for rest in (expected[step.offset :], actual[step.offset :]) if not rest.startswith(own)]
    if not own or len(rests) != 1:
        return None
    found = [other for name, other in others if name and rests[0].startswith(name)]
    return abs(logprob - max(found)) if found else None
