"""Contract of the engines of a target: what a draft pool, the services and a host ask of an engine and its sessions.

`TargetEngine` fulfils it with passes of this process. An engine that computes elsewhere, on a thread or in processes of
its own, can stand in its place: all methods are called from one event loop, and all events are read there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, TypeVar

from specdec.inference.commit import TokenEvent, TokenSource
from specdec.inference.model.decoder import Matcher
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.speculation.tree import Branch


class VerificationSession(Protocol):
    """Request at an engine of a target.

    Attributes:
        request: the request, with the sampling parameters that its tokens obey.
        num_cached_tokens: prompt tokens that need not be computed again.
    """

    request: GenerationRequest
    num_cached_tokens: int

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and committed output."""

    @property
    def id(self) -> str:
        """Name of the session, for logs; unique in the process."""

    @property
    def request_id(self) -> str:
        """Id of the client's request, for the logs of other processes."""

    @property
    def help_id(self) -> str:
        """Name of the session for its present draft worker; `begin_help` and `end_help` change it."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether a draft worker proposes without waiting for verdicts."""

    @property
    def idle_s(self) -> float:
        """Seconds for which a pass has waited for a proposal; 0 if none waits."""

    def fail(self, error: Exception) -> None:
        """End the session's answer with an error, after the events that are unread."""


SessionT = TypeVar("SessionT", bound=VerificationSession)


class VerificationEngine(TokenSource, Protocol[SessionT]):
    """Engine of a target: a `TokenSource` that also verifies the proposals of draft workers."""

    @property
    def seed_invariant(self) -> bool:
        """Return whether a seed gives the same tokens at every engine of the same model."""

    @property
    def pass_us(self) -> int:
        """Recent time of a pass over one session without draft tokens, in microseconds; 0 while unknown."""

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return the request's grammar, compiled for `open`; None if it has none, or if the engine compiles it itself.

        Raises:
            InvalidRequestError: it has a fault, or the engine cannot keep to grammars.
            CapacityError: too many grammars are being compiled.
        """

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> SessionT:
        """Queue a request, which decodes alone until `begin_help`.

        Raises:
            InvalidRequestError: the request does not fit the model.
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """

    def answer(self, session: SessionT) -> AsyncGenerator[TokenEvent, None]:
        """Yield the session's Opened and its commits to the last one; closing the generator closes the session."""

    def close(self, session: SessionT) -> None:
        """Free what the session holds; a second call has no effect."""

    def propose(self, session: SessionT, branches: Sequence[Branch]) -> None:
        """Grow the session's draft tree; without branches, the next pass decodes the target's own token.

        Raises:
            InvalidRequestError: a branch is too long, its parent never existed, or a token id is unknown.
        """

    def begin_help(self, session: SessionT, schedule: Schedule) -> None:
        """Begin to verify the proposals of a draft worker; its node numbers start at 0."""

    def end_help(self, session: SessionT) -> None:
        """Let the session decode alone again."""
