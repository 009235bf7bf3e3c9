"""Result of one prompt, and comparison of results with and without a draft model; notebooks show both in colour."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, TokenLogprobs
from specdec.inference.errors import SpecDecError, cut
from specdec.inference.observe.host_load import HostLoad
from specdec.inference.observe.stats import RequestStats
from specdec.inference.workers.calls.status import code_name

DRAFTED = "background: rgba(46, 160, 67, 0.25)"
"""CSS style of the text of accepted draft tokens."""
MAX_SHOWN_CHARACTERS = 40
NUM_PAIRS = 4
"""Number of pairs of runs in a comparison: one with the draft, and one without."""


@dataclass(slots=True, repr=False)
class Result:
    """Result of one completion, which grows as its events arrive.

    Attributes:
        prompt: text of the prompt; if a program gave it, also token ids or a `Chat`.
        stats: figures of the completion, such as times, numbers of tokens, and acceptance.
        error: error that ended the completion; None if there was none.
        pieces: parts of the text, each with True if it comes from an accepted draft token.
    """

    prompt: Any
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: SpecDecError | None = None
    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def record(self, event: TextEvent) -> None:
        """Add an event of the answer, which has just arrived."""
        self.stats.take(event)
        if isinstance(event, Started):
            self.seed = event.seed
        elif isinstance(event, Delta):
            self.text += event.text
            self.token_ids.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
            self.pieces.extend(event.marked())
        elif isinstance(event, Finished):
            self.finish_reason = event.reason

    def to_json(self) -> dict[str, Any]:
        """Return the object that --format json prints; times are in seconds."""
        stats = self.stats
        fields: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "seed": self.seed,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_cached_tokens": stats.num_cached_tokens,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "timings": {"ttft_s": stats.ttft_s, "tpot_s": stats.tpot_s, "end_to_end_s": stats.end_to_end_s},
        }
        if self.error is not None:
            fields["error"] = {"code": code_name(self.error), "message": str(self.error)}
        return fields

    def __repr__(self) -> str:
        reason = self.finish_reason.value if self.finish_reason else "unfinished"
        shown = " -> ".join(cut(repr(each), MAX_SHOWN_CHARACTERS) for each in (self.prompt, self.text))
        return f"Result({shown}, {len(self.token_ids)} tokens, {', '.join(self._figures())}, {reason})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the text, with accepted draft tokens in colour, and a few figures."""
        prompt = escape(self.prompt) if isinstance(self.prompt, str) else ""
        parts = (f'<span style="{DRAFTED}">{escape(text)}</span>' if own else escape(text) for text, own in self.pieces)
        text = f'<span style="opacity: 0.6">{prompt}</span>{"".join(parts)}'
        return f'<div style="white-space: pre-wrap">{text}</div><small>{" · ".join(self._figures())}</small>'

    def _figures(self) -> list[str]:
        stats = self.stats
        figures = [f"{stats.tokens_per_s:.1f} tokens/s"]
        if stats.acceptance_rate is not None and stats.mean_acceptance_length is not None:
            figures.append(f"{stats.acceptance_rate:.0%} of the draft tokens accepted")
            figures.append(f"{stats.mean_acceptance_length:.2f} tokens per verifying pass")
        return figures


@dataclass(slots=True, repr=False)
class Comparison:
    """Results of one prompt with a draft model and by the target alone, made in pairs, one run after the other.

    Attributes:
        drafted, alone: results with the draft model and without it; those at the same index are a pair.
        load: how busy other programs kept this machine during the runs; None if it was not measured.
    """

    drafted: list[Result] = field(default_factory=list)
    alone: list[Result] = field(default_factory=list)
    load: HostLoad | None = None

    @classmethod
    async def of(cls, run: Callable[[bool], Awaitable[Result]]) -> Comparison:
        """Return the comparison of `NUM_PAIRS` pairs of runs, in the order alone, drafted, drafted, alone, and so on.

        In this order, what grows slowly, such as a processor's heat or another program's load, slows both kinds alike.

        Args:
            run: function that completes the prompt, with the draft if its argument is True.
        """
        comparison = cls()
        for number in range(2 * NUM_PAIRS):
            is_drafted = number % 4 in (1, 2)
            (comparison.drafted if is_drafted else comparison.alone).append(await run(is_drafted))
        return comparison

    @property
    def is_exact(self) -> bool:
        """Return whether all runs, with the draft model and without it, gave the same output tokens."""
        return len({tuple(result.token_ids) for result in (*self.drafted, *self.alone)}) == 1

    @property
    def speed_ups(self) -> list[float]:
        """Return for each pair the time of the run without the draft, divided by the time of the run with it."""
        pairs = zip(self.drafted, self.alone, strict=True)
        return [alone.stats.end_to_end_s / drafted.stats.end_to_end_s for drafted, alone in pairs]

    @property
    def speed_up(self) -> float:
        """Return the median over pairs of how many times as fast the run with the draft model was.

        It says little if other programs kept the machine busy (`load`).
        """
        return statistics.median(self.speed_ups)

    def __repr__(self) -> str:
        return f"Comparison({self._summary()}: {self.drafted[0]!r})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the texts with the draft model and by the target alone, side by side."""
        shown: Sequence[tuple[str, Result]] = (("with the draft", self.drafted[0]), ("target alone", self.alone[0]))
        cells = "".join(
            f'<td style="text-align: left; vertical-align: top; width: 50%"><b>{name}</b>{result._repr_html_()}</td>'
            for name, result in shown
        )
        return f"<b>{self._summary()}</b><table><tr>{cells}</tr></table>"

    def _summary(self) -> str:
        busy = "" if self.load is None else self.load.warning
        tokens = "the same" if self.is_exact else "OTHER"
        return f"{span_of(self.speed_ups, ' to ')} times as fast, {tokens} tokens{busy and f'. {busy}'}"


def span_of(values: Sequence[float], joint: str) -> str:
    """Return the least and the greatest value with one decimal and `joint` between; one number if they look equal."""
    return joint.join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))
