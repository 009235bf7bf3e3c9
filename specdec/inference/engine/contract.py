"""Contract of a target's engine and its sessions: the methods that the draft pool, gRPC services and the server call.

`TargetEngine` fulfils it with passes of this process. An engine that computes elsewhere, on a thread or in processes of
its own, can stand in its place: all methods are called from one event loop, and all events are read there.
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
        request: the request, with the sampling parameters that its tokens obey.
        num_cached_tokens: number of prompt tokens that the session's slot held already when it entered.
    """

    request: GenerationRequest
    num_cached_tokens: int

    @property
    def token_ids(self) -> Sequence[int]:
        """Return the prompt's tokens, then the committed output tokens."""

    @property
    def id(self) -> str:
        """Return the name of the session in logs; unique in the process."""

    @property
    def request_id(self) -> str:
        """Return the id of the client's request, which the logs of all processes have in common."""

    @property
    def help_id(self) -> str:
        """Return the session's name at its present draft worker; `begin_help` and `end_help` change this name."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether a draft worker proposes for this session without waiting for verdicts."""

    @property
    def idle_s(self) -> float:
        """Return the seconds for which the session's next pass has waited for a proposal; 0 if it waits for none."""

    def fail(self, error: Exception) -> None:
        """End the session's answer with an error, once the events before it have been read."""


SessionT = TypeVar("SessionT", bound=VerificationSession)


class VerificationEngine(TokenSource, Protocol[SessionT]):
    """Engine of a target: a `TokenSource` that also verifies the proposals of draft workers."""

    drafting: Drafting
    """Switch that stops or allows all drafting."""

    @property
    def seed_invariant(self) -> bool:
        """Return whether equal seeds give equal tokens at every engine of the same model."""

    @property
    def pass_us(self) -> int:
        """Return the recent time of a pass over one session without draft tokens, in microseconds; 0 while unknown."""

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that gives most tokens under the present load, for requests that ask for no schedule."""

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return the request's grammar, compiled for `open`; None if it has none, or if the engine compiles it itself.

        Raises:
            InvalidRequestError: the grammar has a fault, or the engine cannot keep to grammars.
            CapacityError: too many grammars are being compiled.
        """

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> SessionT:
        """Queue a request; its session decodes without draft tokens until `begin_help` is called.

        Raises:
            InvalidRequestError: the request does not fit the model.
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """

    def answer(self, session: SessionT) -> AsyncGenerator[TokenEvent, None]:
        """Yield the session's Opened event, then its commits; closing the generator closes the session."""

    def close(self, session: SessionT) -> None:
        """Free what the session holds; a second call has no effect."""

    def propose(self, session: SessionT, branches: Sequence[Branch]) -> None:
        """Add branches to the session's draft tree; with none, the next pass decodes one token without verifying any.

        Raises:
            InvalidRequestError: a branch is too long, its parent never existed, or a token id is unknown.
        """

    def begin_help(self, session: SessionT, schedule: Schedule) -> None:
        """Begin to verify a draft worker's proposals; the worker numbers its draft tokens, the tree's nodes, from 0."""

    def end_help(self, session: SessionT) -> None:
        """Stop verifying proposals: the session decodes without draft tokens again."""


class DecodesAlone:
    """Part of an engine that makes it a `TokenSource` by its other methods."""

    async def generate(
        self: VerificationEngine[SessionT], request: GenerationRequest
    ) -> AsyncGenerator[TokenEvent, None]:
        """Decode a request without a draft worker; see `TokenSource`."""
        session = self.open(request, grammar=await self.compiled(request))
        async with aclosing(self.answer(session)) as events:
            async for event in events:
                yield event
