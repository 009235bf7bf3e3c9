"""Contract of a target's engine and its sessions: the methods that the draft pool, gRPC services and the server call.

`TargetEngine` implements it with passes in this process; an engine that computes elsewhere, in threads or processes of
its own, can take its place. All methods are called from one event loop, and all events are read on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from specdec.inference.commit import TokenEvent, TokenSource
from specdec.inference.engine.drafting import Drafting
from specdec.inference.model.decoder import Matcher
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.speculation.tree import Branch


class VerificationSession(Protocol):
    """State of one request at a target's engine.

    Attributes:
        id: name of the session in logs; unique in the process.
        request_id: id of the client's request, under which the logs of all processes name it.
        request: the request, with the sampling parameters that its tokens obey.
    """

    id: str
    request_id: str
    request: GenerationRequest

    @property
    def token_ids(self) -> Sequence[int]:
        """Return the prompt's tokens, then the committed output tokens."""

    @property
    def help_id(self) -> str:
        """Return the name by which the session's present draft worker knows it; each change of worker changes it."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether a draft worker goes on drafting before the target has verified its earlier draft tokens."""

    @property
    def idle_s(self) -> float:
        """Return for how many seconds the session has waited for a proposal of its worker; 0 if it waits for none."""

    def fail(self, error: Exception) -> None:
        """End the session's answer with an error, which its reader gets after the events before it."""


SessionT = TypeVar("SessionT", bound=VerificationSession)


class VerificationEngine(TokenSource, Protocol[SessionT]):
    """Engine of a target: it answers requests with tokens, as a `TokenSource`, and verifies draft workers' proposals.

    Attributes:
        drafting: on-off switch of drafting, for all sessions of the engine.
        seed_invariant: True if a request with a seed gets the same tokens from every engine of the same model.
    """

    drafting: Drafting
    seed_invariant: bool

    @property
    def pass_us(self) -> int:
        """Return the recent time of a pass over one session without draft tokens, in microseconds; 0 if unknown."""

    @property
    def schedule(self) -> Schedule:
        """Return the schedule, synchronous or run-ahead drafting, for requests that set none.

        It is the one that gives most tokens per second at the present number of sessions.
        """

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return the request's grammar, compiled for `open`; None without a grammar, or if `open` itself compiles it.

        Raises:
            InvalidRequestError: the grammar has a fault, or the engine cannot keep to grammars.
            CapacityError: too many grammars are being compiled.
        """

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> SessionT:
        """Queue a request; its session decodes without draft tokens until `begin_help` is called.

        Args:
            request: the request.
            grammar: what `compiled` returned for the request.

        Raises:
            InvalidRequestError: the request does not fit the model.
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """

    def answer(self, session: SessionT) -> AsyncGenerator[TokenEvent, None]:
        """Yield the session's `Opened` event, then its commits of tokens; closing the generator closes the session."""

    def close(self, session: SessionT) -> None:
        """Free the session's slot, or remove it from the queue; a second call has no effect."""

    def propose(self, session: SessionT, branches: Sequence[Branch]) -> None:
        """Add branches, each a chain of draft tokens, to the session's draft tree, from which passes verify tokens.

        If `branches` is empty, the next pass decodes one token of the session without verifying any.

        Raises:
            InvalidRequestError: a branch is too long, its parent never existed, or a token id is unknown.
        """

    def begin_help(self, session: SessionT, schedule: Schedule) -> None:
        """Begin to verify a draft worker's proposals for a session; the worker numbers its draft tokens from 0."""

    def end_help(self, session: SessionT) -> None:
        """Stop verifying proposals: the session decodes without draft tokens again."""


class DecodesAlone:
    """Mixin that gives an engine the method `generate` of a `TokenSource`, made of its other methods."""

    async def generate(
        self: VerificationEngine[SessionT], request: GenerationRequest
    ) -> AsyncGenerator[TokenEvent, None]:
        """Decode a request without a draft worker, and yield its events as `TokenSource.generate` does."""
        session = self.open(request, grammar=await self.compiled(request))
        async with aclosing(self.answer(session)) as events:
            async for event in events:
                yield event
