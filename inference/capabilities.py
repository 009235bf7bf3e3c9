"""What some backends and decoders can say of themselves beyond their protocol, and how to ask.

Optional: whoever does not say it has no such limit. So the engine asks, and never guesses by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inference.errors import InvalidRequestError
from inference.types import Decoder, Draft, DraftToken, GenerationRequest, SamplingParams


@runtime_checkable
class CompiledShapes(Protocol):
    """A backend whose passes are compiled graphs of fixed widths."""

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of one span that fit into one graph; more are several graphs' work."""

    @property
    def prompt_chunk_tokens(self) -> int:
        """Length of the parts in which a long prompt is best read."""


@runtime_checkable
class LimitedDecoder(Protocol):
    """A decoder that cannot do all that a request may ask for."""

    @property
    def seed_invariant(self) -> bool:
        """Whether equal seeds give equal tokens."""

    @property
    def prompt_chunk_tokens(self) -> int:
        """Length of the parts in which a long prompt is best read."""

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that the decoder cannot serve."""


@runtime_checkable
class ForkingBackend(Protocol):
    """A backend that copies what one slot holds to another."""

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1; what the destination held elsewhere stays."""


@runtime_checkable
class BranchingProposer(Protocol):
    """A proposer with slots for branches beside the chain, `num_branches` for each of its own slots.

    Slot s of the sequences has the slots num_slots + s * num_branches + b for b = 0 .. num_branches - 1.
    """

    @property
    def num_branches(self) -> int: ...

    def extend_ranked(self, drafts: Sequence[Draft]) -> list[list[DraftToken] | None]:
        """`Proposer.extend`, with every token's runner-up."""


class CompiledDecoder(Decoder, Protocol):
    """A decoder that is a model of its own, not made of slot models: draft, target and verdict in one graph."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output may have together."""

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot's keys and values, in bytes."""


def prompt_chunk_tokens(model: object, default: int) -> int:
    """In what parts a model or decoder wants long prompts; `default` if it does not care."""
    return model.prompt_chunk_tokens if isinstance(model, CompiledShapes | LimitedDecoder) else default


def max_pass_draft_tokens(model: object, default: int) -> int:
    """Draft tokens that fit into one pass behind the last committed token, `default` at most."""
    return min(default, model.max_pass_tokens - 1) if isinstance(model, CompiledShapes) else default


@runtime_checkable
class SeedAware(Protocol):
    """A decoder or engine that says whether equal seeds give equal tokens."""

    @property
    def seed_invariant(self) -> bool: ...


def is_seed_invariant(model: object) -> bool:
    """Whether equal seeds give equal tokens; so they do wherever tokens are chosen with the shared noise."""
    return model.seed_invariant if isinstance(model, SeedAware) else True


def check_seed(generator: object, sampling: SamplingParams) -> None:
    """Refuse a seed that somebody chose and that would not be kept; greedy decoding needs none.

    Raises:
        InvalidRequestError: the generator samples without it.
    """
    if not sampling.greedy and not is_seed_invariant(generator):
        raise InvalidRequestError(
            "seed: this server samples on the device, where equal seeds give other tokens: omit it"
        )


def num_branches(proposer: object) -> int:
    """How many branches of each sequence a proposer has room for."""
    return proposer.num_branches if isinstance(proposer, BranchingProposer) else 0


def check_request(decoder: object, request: GenerationRequest) -> None:
    """Let a decoder refuse what it cannot do.

    Raises:
        InvalidRequestError: naming what it is.
    """
    if isinstance(decoder, LimitedDecoder):
        decoder.check(request)
