"""Host's own time per pass at short and at long contexts: `python -m benchmarks.host_time [--contexts 1024,32768]`.

The model costs nothing: its logits are a row of a table. The rest is the server's work for each pass of a request,
from the schedule to the text of the delta, with each feature that a request may ask for, and with all of them. The
context is half prompt and half output, as after a long answer. Code that walks or copies the context shows in the ratio
of long to short ones.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.report import print_json, print_table
from specdec.inference.commit import Commit, Delta, Opened, TokenEvent
from specdec.inference.config import BUNDLED_TARGET
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.slots import Span
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import CompletionRequest

VOCAB_SIZE = 2048
TEXT = "the old man and the sea went out to look for a fish that was not there and so they sat and waited "
NUM_TOKENS = 96
PENALTIES = SamplingParams(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
LETTERS = Grammar(GrammarKind.REGEX, "[a-z ]*")


class FreeModel:
    """`Backend` that takes no time: its logits are a row of a table, by the position alone."""

    vocab_size, num_slots, slot_bytes = VOCAB_SIZE, 4, 0

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._rows = np.random.default_rng(0).normal(size=(97, VOCAB_SIZE)).astype(np.float32)

    def forward(self, spans: Sequence[Span]) -> npt.NDArray[np.float32]:
        ends = [span.start + len(span.token_ids) for span in spans]
        rows = [row % 97 for span, end in zip(spans, ends, strict=True) for row in range(end - span.num_logits, end)]
        return self._rows[rows]


@dataclass(frozen=True)
class Resumed:
    """`TokenSource` that wraps an engine: every request starts as if `output` had been generated already."""

    engine: TargetEngine
    output: tuple[int, ...]

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield Opened, the given output as the first commit, and the commits of the engine that continues it."""
        yield Opened()
        yield Commit(len(request.prompt_token_ids), self.output)
        rest = replace(request.resumed(self.output), max_new_tokens=NUM_TOKENS)
        async with aclosing(self.engine.generate(rest)) as events:
            async for event in events:
                if isinstance(event, Commit):
                    yield event


def main() -> None:
    args = _parser().parse_args()
    contexts = [int(length) for length in args.contexts.split(",")]
    found = asyncio.run(_measure(contexts, args.rounds))
    header = ["", *(f"{length} tokens, ms" for length in contexts), "ratio"]
    body = [
        [name, *(f"{times[length]:.3f}" for length in contexts), f"{times[contexts[-1]] / times[contexts[0]]:.2f}"]
        for name, times in found.items()
    ]
    print_table("the host's time per pass, median", header, body)
    print_json("host_time", found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--contexts", default="1024,32768", help="tokens before the first pass (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    return parser


def _requests() -> dict[str, CompletionRequest]:
    greedy = SamplingParams()
    plain = CompletionRequest((0,), greedy, seed=1, ignore_eos=True, gamma=0)
    asked = {
        "nothing asked for": plain,
        "penalties": replace(plain, sampling=PENALTIES),
        "stop strings": replace(plain, stop=("no such text", "nor this one")),
        "log-probabilities": replace(plain, logprobs=5),
        "lookup": replace(plain, gamma=None),
        "grammar": replace(plain, ignore_eos=False, grammar=LETTERS, gamma=None),
    }
    all_of_it = replace(asked["grammar"], sampling=PENALTIES, stop=("no such text",), logprobs=5)
    return {**asked, "all of it": all_of_it}


async def _measure(contexts: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Return median milliseconds per pass, by feature of a request and by length of its context in tokens."""
    tokenizer = Tokenizer.load(BUNDLED_TARGET)
    model = FreeModel(max(contexts) + 2 * NUM_TOKENS)
    times: dict[str, dict[int, list[float]]] = {}
    limits = EngineLimits(gamma=4, eos_token_ids=tokenizer.eos_token_ids)
    grammars = Grammars(GrammarCompiler(tokenizer, VOCAB_SIZE))
    async with running(TargetEngine(SlotDecoder(model), limits, grammars)) as engine:
        for _ in range(rounds):
            for name, request in _requests().items():
                for length in contexts:
                    half = _text(tokenizer, length // 2)
                    completer = LocalCompleter(Resumed(engine, half), tokenizer)
                    passes = await _passes(completer, replace(request, prompt=half))
                    times.setdefault(name, {}).setdefault(length, []).append(passes)
    for length in contexts:
        times.setdefault("a draft's step", {})[length] = [await _draft_step(model, _text(tokenizer, length))]
    return {
        name: {length: float(np.median(samples)) for length, samples in by_length.items()}
        for name, by_length in times.items()
    }


def _text(tokenizer: Tokenizer, length: int) -> tuple[int, ...]:
    token_ids = tokenizer.encode(TEXT, special=False)
    return (token_ids * (length // len(token_ids) + 1))[:length]


async def _passes(completer: LocalCompleter, request: CompletionRequest) -> float:
    """Run one request; return its median milliseconds per pass, without the passes that read its context."""
    arrivals = []
    async for event in completer.complete(request):
        if isinstance(event, Delta):
            arrivals.append(time.perf_counter())
    return float(np.median(np.diff(arrivals[2:]))) * 1e3


async def _draft_step(model: FreeModel, context: tuple[int, ...]) -> float:
    """Return the milliseconds that the draft engine takes for one draft token, with penalties, after a context."""
    async with running(DraftEngine(ModelProposer(model))) as engine:
        session = engine.open(context, PENALTIES, output_start=len(context) // 2)
        await engine.propose(session, 4)
        started = time.perf_counter()
        for _ in range(8):
            engine.commit(session, [5])
            await engine.propose(session, 4)
        return (time.perf_counter() - started) / 32 * 1e3


if __name__ == "__main__":
    main()
