"""Tools for the tests of programs that use this project: servers in this process, and scripted answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace

from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings, TokenLogprobs
from specdec.inference.config import HttpConfig, ObserveConfig, ServerConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import NO_DEFAULTS, UNKNOWN, Provenance
from specdec.inference.serving.assembly import model_card, target_engine
from specdec.inference.serving.event_loop import new_event_loop
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import opened
from specdec.inference.serving.models import PairSettings, fused_config
from specdec.inference.serving.observers import Observers
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import Codec, Completer, CompletionRequest, ModelCard

MAX_WAITING = 64
CARD = ModelCard("tiny", "fused", 128, 288, "0123", call_format="hermes")
"""Description of the imaginary model whose answers are scripted."""
REJECTED = "other "
"""Text of the draft token that each scripted pass rejects, for requests with `include_rejected`."""

SCORES = tuple(
    TokenLogprobs((5, 6), (logprob, -0.25), (text, b"x"), len(text))
    if logprob
    else TokenLogprobs((5,), (logprob,), (text,), len(text))
    for text, logprob in ((b"pro", 0.0), (b"mpt", -1.5), (b" ", -2.5))
)
"""Log-probabilities of the three tokens of a scripted prompt, for requests that ask for them."""


class ScriptedCompleter:
    """Completer (object that answers requests) whose answers are scripted passes of a target, without a model.

    All tokens of a pass but the last are accepted draft tokens.

    Args:
        passes: for each pass, the texts of its tokens.
        error: exception to raise after the passes, or at once if there are none; None raises none.
        gap_s: seconds to wait before each pass.
        reason: reason with which the answers end.
        prompt: text that requests with `echo` get as that of their prompt.
        origin: `Provenance`, such as the model's identity, that the answers report.

    Attributes:
        requests: all requests so far.
        num_running: number of requests that are being answered.
        hangs: set it to True to let answers wait for ever after their last pass.
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
        """Add the request to `requests`, and yield the events of the scripted answer."""
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


def delta(position: int, pieces: Sequence[str], logprobs: int | None, reason: FinishReason | None) -> Delta:
    """Return the event of a pass whose tokens have these texts; all but the last are accepted draft tokens.

    Args:
        position: position of the first of these tokens.
        logprobs: number of alternatives with log-probabilities at each position; None: no log-probabilities.
        reason: finish reason; None if the answer goes on.
    """
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


@dataclass(frozen=True, slots=True)
class Served:
    """Addresses of a server in this process.

    Attributes:
        address: HOST:PORT for `Client`.
        url: base URL for clients of OpenAI's API.
    """

    address: str
    url: str


@contextmanager
def serving(completer: Completer | None = None) -> Generator[Served, None, None]:
    """Serve gRPC and HTTP on free ports during the block, in a thread with an event loop of its own; yield addresses.

    Args:
        completer: object that answers the requests, such as a `ScriptedCompleter`; None: the bundled pair of models.
    """
    loop, stack = new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever, name="specdec.testing", daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(_opened(stack, completer), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _opened(stack: AsyncExitStack, completer: Completer | None) -> Served:
    card, codec = CARD, None
    if completer is None:
        completer, card, codec = await _pair(stack)
    observe, metrics = ObserveConfig("testing"), Metrics(card.name)
    observers = Observers(observe, None, None)
    answering = observers.around(completer, metrics, model=card.name)
    ports = Ports(ServerConfig(port=0, grace_s=0.0), observe, HttpConfig(0))
    fronts = ports.fronts(observers, metrics, [GenerationServicer(answering, card, codec)])
    for front in fronts:
        await stack.enter_async_context(opened(front))
    numbers = {name: port for front in fronts for name, port in front.ports.items()}
    return Served(f"127.0.0.1:{numbers['grpc']}", f"http://127.0.0.1:{numbers['http']}/v1")


async def _pair(stack: AsyncExitStack) -> tuple[Completer, ModelCard, Codec]:
    config = fused_config(PairSettings())
    running = await stack.enter_async_context(target_engine(config, EngineLimits(MAX_WAITING)))
    local = LocalCompleter(running.engine, running.tokenizer)
    return local, model_card(config.target.name, "fused", running.engine, running.tokenizer, NO_DEFAULTS), local.codec
