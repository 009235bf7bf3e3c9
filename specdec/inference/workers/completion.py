"""Interface between clients and servers: requests, the `Completer` that answers them, and the model's description."""

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
"""Length in bytes of `GenerateRequest.draft_session`: the name by which a client that runs a draft model itself tells
the target for which request its draft tokens are."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of a served model, which the gRPC method GetModel returns to clients.

    Attributes:
        name: name by which clients know the model.
        topology: kind of the server: "target", "fused" (target and draft), "distributed" (a draft worker that serves
            clients), or "gateway".
        max_length: most tokens of prompt and output together.
        tokenizer_fingerprint: `Tokenizer.fingerprint`; where it is equal, token ids have the same meaning.
        chat_template: template of the model's conversations; None if it has none.
        defaults: values for parameters that a request leaves open.
        model_id: hash of all that the model's tokens depend on; empty if it is unknown.
        call_format: name of the format in which the model writes calls of tools; empty if it is not known, None if the
            server is older and does not say.
        adapters: names of the model's adapters (LoRA), which a request can ask for.
        adapter: adapter that the card stands for; empty for the model itself.
        text_fingerprint: `Tokenizer.text_fingerprint`; where it is equal, token ids give the same text. Empty if it is
            unknown.
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
        """Return the card with another name for the model; None keeps the name."""
        return self if name is None else replace(self, name=name)

    def of_adapter(self, name: str) -> ModelCard:
        """Return the card of the model's adapter called `name`, under that name."""
        return replace(self, name=name, adapter=name)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a server needs to continue an answer that another server of the same model has begun.

    Attributes:
        token_ids: output tokens that the other server committed.
        provenance: what these tokens were computed with (model, grammar version, prompt), from the other server's first
            event.
    """

    token_ids: tuple[int, ...]
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class CompletionRequest(Options):
    """Request of a client for one output; `Options` has further parameters.

    Attributes:
        prompt: text, token ids taken as they are, or a conversation.
        sampling: parameters of the choice of tokens.
        seed: seed of the random choices; None lets the server draw one. `sampling.seed` is ignored.
        seed_scope: requests to which the seed gives the same random numbers: all, or those of the same prompt.
        unsaid: names of the fields of `sampling` for which the server is to take its own defaults.
        max_new_tokens: most output tokens; None leaves the limit to the server.
        ignore_eos: True if the model's own end-of-sequence ids do not end the sequence.
        stop: strings before which the text ends.
        echo: True to give the prompt's text in the answer's first event; `max_new_tokens` may then be 0.
        deadline: the event loop's time at which the client stops waiting; None waits for ever.
        ids_only: True to give token ids without their text; `stop` must be empty then.
        audit: token ids of an output, to compare with the target's own choices; the first event has the result, and
            `max_new_tokens` may be 0. None: no output is compared.
        prediction: text that the output may repeat, all or in parts; it changes only the speed.
        resume: output tokens of another server, after which to continue; all else is as in the request to that server.
            None: a new request.

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
        """Return the request with the server's defaults for the parameters that it leaves open.

        The default limit of output tokens is lowered to that of the current request's caller, if the caller has one.
        """
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
    """Interface of what answers completion requests, whether in this process or by a server.

    It runs on the event loop. Any number of answers may be open at a time; each is read by one task.

        async with aclosing(completer.complete(CompletionRequest("1, 2, 3,", seed=7))) as events:
            text = "".join([event.text async for event in events if isinstance(event, Delta)])
    """

    def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the answer: one Started, one Delta for each target pass, and one Finished.

        Started comes with the first pass of the model, so a request that is refused yields nothing. Closing the
        iterator cancels the request.

        Raises:
            InvalidRequestError: a value is out of range; `field` names it.
            CapacityError: there is no room now; ask again after `retry_after_s`.
            DeadlineError: the request is not finished at its deadline.
            UnavailableError: the server is lost or stopping, and no other one can go on.
            SpecDecError: another failure, with the status that `inference/workers/calls/status.py` gives it.
        """


class Codec(Protocol):
    """Interface of what converts prompts to token ids and back, with the tokenizer of one model."""

    async def encode(self, prompt: str | Chat, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation; `special` adds the model's special tokens to a text."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens by their names."""
