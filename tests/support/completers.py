"""Completers without a model: they answer with texts that a test sets, and record the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings, TokenLogprobs
from specdec.inference.config import HttpConfig
from specdec.inference.gateway.app import Gateway
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import UNKNOWN, Provenance
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completion import Codec, Completer, CompletionRequest, ModelCard

REJECTED = "other "
"""Text of the draft token that every pass rejects."""
CARD = ModelCard("tiny", "fused", 128, 288, "0123", call_format="hermes")


SCORES = tuple(
    TokenLogprobs((5, 6), (logprob, -0.25), (text, b"x"), len(text))
    if logprob
    else TokenLogprobs((5,), (logprob,), (text,), len(text))
    for text, logprob in ((b"pro", 0.0), (b"mpt", -1.5), (b" ", -2.5))
)
"""Log-probabilities of the prompt's tokens, for requests that ask for them."""


class ScriptedCompleter:
    """Completer that answers with scripted passes; all tokens of a pass but the last count as accepted.

    Args:
        passes: the texts of each pass's tokens.
        error: exception to raise after the passes, or at once if there are none.
        gap_s: seconds to wait before each pass.
        reason: finish reason.
        prompt: text of the prompt, for a request with echo.
        origin: origin of the text's tokens.
    """

    def __init__(
        self,
        passes: Sequence[Sequence[str]],
        *,
        error: Exception | None = None,
        gap_s: float = 0.0,
        reason: FinishReason = FinishReason.LENGTH,
        prompt: str = "prompt ",
        origin: Provenance = UNKNOWN,
    ) -> None:
        self._passes = passes
        self._error = error
        self._gap_s = gap_s
        self._reason = reason
        self._prompt = prompt
        self._origin = origin
        self.requests: list[CompletionRequest] = []
        self.num_running = 0
        self.hangs = False  # for ever, after its last pass

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        self.requests.append(request)
        self.num_running += 1
        try:
            if self._passes:
                scores = () if request.prompt_logprobs is None else SCORES
                text = self._prompt if request.echo else ""
                yield Started(3, request.seed or 0, text, scores, num_cached_tokens=2, provenance=self._origin)
            if request.max_new_tokens == 0:
                yield Finished(FinishReason.LENGTH)
                return
            position = 3
            for number, pieces in enumerate(self._passes):
                await asyncio.sleep(self._gap_s)
                is_last = number == len(self._passes) - 1 and self._error is None and not self.hangs
                reason = self._reason if is_last else None
                event = delta(position, pieces, request.logprobs, reason)
                yield replace(event, rejected_text=REJECTED) if request.include_rejected else event
                position += len(pieces)
            if self.hangs:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
            yield Finished(self._reason)
        finally:
            self.num_running -= 1


class WordCodec:
    """Codec with a token per word; the token's id is the word's length."""

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        text = prompt if isinstance(prompt, str) else " ".join(each.content for each in prompt.messages)
        return (1,) * special + tuple(map(len, text.split()))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join("x" * min(token_id, 9) for token_id in token_ids)


def delta(position: int, pieces: Sequence[str], logprobs: int | None, reason: FinishReason | None) -> Delta:
    num = 0 if logprobs is None else 1 + logprobs
    scores = [TokenLogprobs((7,) * num, (-0.5,) * num, (piece.encode(),) * num, len(piece)) for piece in pieces]
    return Delta(
        position,
        token_ids=(7,) * len(pieces),
        text="".join(pieces),
        num_draft_tokens=len(pieces),
        num_accepted_tokens=len(pieces) - 1,
        timings=Timings(queue_us=10, compute_us=20),
        piece_lengths=tuple(map(len, pieces)),
        logprobs=tuple(scores) if num else (),
        finish_reason=reason,
    )


WORDS = WordCodec()


async def healthy() -> bool:
    return True


def gateway(
    completer: Completer,
    *,
    is_healthy: Callable[[], Awaitable[bool]] = healthy,
    codec: Codec | None = WORDS,
    **settings: Any,
) -> Gateway:
    """Return a gateway with metrics over a completer; `settings` are fields of `HttpConfig`."""
    metrics = Metrics(CARD.name)
    observed = SupervisedCompleter(completer, Observer(metrics))
    metrics.watch(observed)
    return Gateway(observed, CARD, metrics, is_healthy, replace(HttpConfig(), **settings), codec=codec)
