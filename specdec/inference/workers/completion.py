"""Requests of every topology, the `Completer` that answers them, and the card of a served model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specdec.inference.caller import caller
from specdec.inference.commit import TextEvent
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_PREDICTION_CHARACTERS,
    NO_DEFAULTS,
    Options,
    Provenance,
    RequestDefaults,
    SamplingParams,
    SeedScope,
)
from specdec.inference.text.chat import Chat
from specdec.inference.text.stop_strings import check_stops

DRAFT_SESSION_BYTES = 16
"""Length of the name that a client's process gives to a session; see `GenerateRequest.draft_session`."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of a served model, as GetModel answers it.

    Attributes:
        model_id: empty if it is unknown.
        call_format: name of the format in which the model writes calls of tools; empty if it is not known, None if the
            server is older and does not say.
        adapters: names of the model's adapters, which a request can ask for.
        adapter: adapter that the card stands for; empty for the model itself.
        text_fingerprint: `Tokenizer.text_fingerprint` of the server; empty if it is unknown.
    """

    name: str
    topology: str
    max_length: int
    vocab_size: int
    tokenizer_fingerprint: str
    chat_template: str | None = None
    defaults: RequestDefaults = NO_DEFAULTS
    model_id: str = ""
    adapters: tuple[str, ...] = ()
    adapter: str = ""
    text_fingerprint: str = ""
    call_format: str | None = None

    def named(self, name: str | None) -> ModelCard:
        """Return this description of the model under another name; None keeps its own."""
        return self if name is None else replace(self, name=name)

    def of_adapter(self, name: str) -> ModelCard:
        """Return the description of one of the model's adapters, under the adapter's name."""
        return replace(self, name=name, adapter=name)


@dataclass(frozen=True, slots=True)
class Resume:
    """Progress of a request at another server, for the server that continues it.

    Attributes:
        token_ids: output tokens committed so far.
        provenance: origin of these tokens, from the other server's Started event.
    """

    token_ids: tuple[int, ...]
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class CompletionRequest(Options):
    """Request of a client.

    Attributes:
        prompt: text, token ids taken as they are, or a conversation.
        seed: None lets the server draw one; `sampling.seed` is ignored.
        seed_scope: requests to which the seed gives the same noise: all, or those of the same prompt.
        unsaid: fields of `sampling` that the client left to the server, among LEFT_TO_SERVER.
        max_new_tokens: None leaves it to the server.
        ignore_eos: the model's own end-of-sequence ids do not end the sequence.
        stop: strings before which the text ends.
        echo: give the prompt's text in Started; with it, `max_new_tokens` may be 0.
        deadline: the event loop's time at which the client stops waiting; None waits for ever.
        ids_only: give token ids without their text; `stop` must be empty then.
        audit: output to compare with the target's own choices, token by token; Started has the result, and
            `max_new_tokens` may be 0. None: no output is audited.
        prediction: text that the output may repeat, all or in parts; it changes only the speed.
        resume: committed tokens to continue after; all else is as in the first server's request. None: a new request.

    Raises:
        InvalidRequestError: fields exceed limits or do not fit together.
    """

    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    seed_scope: SeedScope = SeedScope.ALL
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    echo: bool = False
    deadline: float | None = None
    unsaid: frozenset[str] = frozenset()
    resume: Resume | None = None
    ids_only: bool = False
    audit: tuple[int, ...] | None = None
    prediction: str = ""

    def __post_init__(self) -> None:
        check_stops(self.stop)
        if (num_characters := len(self.prediction)) > MAX_PREDICTION_CHARACTERS:
            message = f"prediction has {num_characters} characters, the limit is {MAX_PREDICTION_CHARACTERS}"
            raise InvalidRequestError(message, field="prediction")
        if self.ids_only and self.stop:
            raise InvalidRequestError("stop: with ids_only there is no text to look for it", field="stop")
        if self.audit == ():
            raise InvalidRequestError("audit: the output has no token", field="audit")
        if self.max_new_tokens == 0 and not self.echo and self.audit is None:
            message = "max_new_tokens 0 is below 1: without echo there is nothing to answer"
            raise InvalidRequestError(message, field="max_new_tokens")

    def resolved(self, defaults: RequestDefaults) -> CompletionRequest:
        """Return the request with the server's defaults for values left open, at most the caller's limits."""
        if not self.unsaid and self.max_new_tokens is not None:
            return self
        values = {name: value for name, value in defaults.sampling.items() if name in self.unsaid}
        limit = self.max_new_tokens
        if limit is None:
            limit = DEFAULT_MAX_NEW_TOKENS if defaults.max_new_tokens is None else defaults.max_new_tokens
            limit = min(limit, caller().limits.max_tokens or limit)
        sampling = replace(self.sampling, **values)
        return replace(self, sampling=sampling, max_new_tokens=limit, unsaid=frozenset())


class Completer(Protocol):
    """Interface of everything that answers completion requests, here or at a server, with prompts and texts.

    It runs on the event loop; any number of iterators may be open, and each is read by one task.

        async with aclosing(completer.complete(CompletionRequest("1, 2, 3,", seed=7))) as events:
            text = "".join([event.text async for event in events if isinstance(event, Delta)])
    """

    def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield one Started, one Delta per commit, one Finished; closing the iterator cancels the request.

        Started comes with the first pass, so a request that is refused yields nothing.

        Raises:
            InvalidRequestError: a value is out of range; `field` names it.
            CapacityError: there is no room now; ask again after `retry_after_s`.
            DeadlineError: the request is not finished at its deadline.
            UnavailableError: the server is lost or stopping, and no other one can go on.
            SpecDecError: another failure, with the status that `inference/workers/calls/status.py` gives it.
        """


class Codec(Protocol):
    """Converter of prompts to token ids, and back."""

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation; `special` adds the model's special tokens to a text."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens by their names."""
