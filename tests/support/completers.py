"""A gateway (the server of OpenAI's HTTP API) that answers with scripted text, and a codec with a token per word."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from specdec.inference.config import HttpConfig
from specdec.inference.gateway.app import Gateway
from specdec.inference.observe.metrics import Metrics
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completion import Codec, Completer
from specdec.testing import CARD as CARD
from specdec.testing import REJECTED as REJECTED
from specdec.testing import SCORES as SCORES
from specdec.testing import ScriptedCompleter as ScriptedCompleter
from specdec.testing import delta as delta


class WordCodec:
    """Replacement of a tokenizer: each word is one token, whose id is the word's length.

    With `special`, a token 1 comes first. Decoding gives for each token a word of as many x's, at most nine.
    """

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        text = prompt if isinstance(prompt, str) else " ".join(each.content for each in prompt.messages)
        return (1,) * special + tuple(map(len, text.split()))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join("x" * min(token_id, 9) for token_id in token_ids)


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
    """Return a gateway that sends requests to `completer`, with metrics; `settings` are fields of `HttpConfig`."""
    metrics = Metrics(CARD.name)
    observed = SupervisedCompleter(completer, Observer(metrics))
    metrics.watch(observed)
    return Gateway(observed, CARD, metrics, is_healthy, replace(HttpConfig(), **settings), codec=codec)
