"""What a model must be, and what it may be: the protocols of backends, decoders and proposers.

Positions and lengths are absolute: position `t` counts from the first prompt token, so a sequence's prompt occupies
positions 0 .. n-1 and its first output token is chosen for position n. The optional protocols say what only some can
do; whoever does not implement one has no such limit or gift, so the engine asks, and never guesses by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from inference.commit import NO_OWN_DRAFTS, OwnDrafts, TokenLogprobs
from inference.errors import InvalidRequestError, SpecDecError
from inference.request import GenerationRequest, SamplingParams
from inference.tokens import Tally

Array: TypeAlias = Any
"""A numpy array or a torch tensor; functions that take one return the same kind, on the same device."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, to be run through a model in one pass.

    Attributes:
        slot: the sequence's KV room, 0 <= slot < num_slots.
        start: absolute position of the first token; everything before it must have been written to the slot.
        token_ids: one or more ids.
        num_logits: for how many of the last tokens logits are wanted, 0 <= num_logits <= len(token_ids).
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int


class Backend(Protocol):
    """A model over slots and positions.

    Writing at a position overwrites what was there, and nothing past the end of a span is visible to it. So rolling
    back a slot is "start earlier next time", and reusing a slot is "start at 0".

    Attributes:
        max_length: positions that a slot holds.
        slot_bytes: memory of one slot's keys and values, in bytes.
    """

    vocab_size: int
    num_slots: int
    max_length: int
    slot_bytes: int

    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over spans of distinct slots.

        Returns:
            float32 logits [sum of num_logits, vocab_size]: the rows of the first span, then those of the second, ...
            Row i of a span's last `num_logits` tokens is the distribution of the token that follows it.
        """


class Matcher(Protocol):
    """A compiled grammar beside one sequence: which tokens may come next. Pure: callers hand over the whole output.

    Used by one thread at a time. `output` is what stands behind the prompt, draft tokens included.
    """

    def num_allowed(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        """How many of the proposal's first tokens the grammar takes; masks may allow fewer, where text is forced and
        a token would only begin it.

        Raises:
            InternalError: the output itself is refused, though every token of it was allowed.
        """

    def masks(self, output: Sequence[int], proposal: Sequence[int]) -> list[bytes | None]:
        """Allowed tokens of the len(proposal) + 1 rows that verify a proposal.

        Returns:
            Per row, one bit per token id, the lowest bit of the first byte first; None where the proposal before it
            is refused or has ended the sequence: no token of that row will ever be committed. Fewer rows where the
            grammar becomes too complex for a mask behind the proposal: of those that lack, no token may be committed.

        Raises:
            InternalError: as `num_allowed`.
            InvalidRequestError: the grammar is too complex for a mask to be made here.
        """

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that must follow the output; none if there is a choice, or the output is refused."""

    def goes_on(self, output: Sequence[int]) -> bool:
        """Whether the output is allowed and not ended."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one sequence wants from one target pass.

    Attributes:
        slot: the sequence's KV room.
        start: how many positions of the sequence the slot holds already.
        token_ids: the committed tokens up to where they are to be written now. Their end is the sequence's end, unless
            the turn is a part of a longer prompt. Not changed while the pass runs.
        sampling: how tokens are chosen.
        proposal: draft tokens to verify behind them; empty for plain decoding.
        gamma: draft tokens that a decoder with a draft of its own may add where the proposal is empty.
        chooses: False for a part of a prompt that ends before its last token: nothing is chosen.
        output_start: position of the sequence's first output token; penalties tell prompt and output apart by it.
        logprobs: as in `GenerationRequest`.
        scored: prompt tokens whose log-probabilities are wanted: those behind `start` that this pass makes known.
        prompt_logprobs: of how many of the best ones there, too.
        grammar: what the output must look like; None: anything.
        lookup: what followed the last tokens where they stood before: verified where there are no draft tokens at all.
        tally: has counted the tokens before for penalties, if anything has; of use on the thread of this pass alone.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    proposal: Sequence[int] = ()
    gamma: int = 0
    chooses: bool = True
    output_start: int = 0
    logprobs: int | None = None
    scored: Sequence[int] = ()
    prompt_logprobs: int = 0
    grammar: Matcher | None = None
    lookup: Sequence[int] = ()
    tally: Tally | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of one turn.

    Attributes:
        token_ids: the tokens it commits: accepted draft tokens, then one of its own.
        num_draft_tokens: draft tokens it verified.
        num_accepted_tokens: how many of them it accepted.
        draft_us: microseconds that the decoder's own draft took.
        logprobs: one per token, if the turn asked for them.
        prompt_logprobs: one per scored token.
        error: why the sequence cannot go on, if it cannot; there are no tokens then.
        own: of the draft tokens, those that no draft made.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_us: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: SpecDecError | None = None
    own: OwnDrafts = NO_OWN_DRAFTS

    @property
    def of_draft(self) -> tuple[int, int]:
        """Of the draft tokens those that a draft made: how many it verified, and accepted."""
        return self.num_draft_tokens - self.own.num_tokens, self.num_accepted_tokens - self.own.num_accepted


class Decoder(Protocol):
    """Takes turns of several sequences through one step; runs on the model thread.

    Attributes:
        max_length: tokens that prompt and output may have together.
        prompt_chunk_tokens: length of the parts in which a long prompt is best read; 0: any.
        keeps_grammars: it chooses here, from logits, and so can keep to a grammar.
    """

    vocab_size: int
    num_slots: int
    max_length: int
    prompt_chunk_tokens: int
    keeps_grammars: bool

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Return one verdict per turn, in order; a turn that does not choose gets no tokens."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain that a proposer is asked to extend.

    Attributes:
        slot: the sequence's room in the draft model.
        token_ids: committed tokens followed by those drafted so far.
        sampling: how the target will choose.
        limit: how many tokens are wanted at most, >= 1.
        output_start: as in `Turn`.
        source_slot: another slot that may hold more of the same tokens, and can be copied from.
        grammar, tally: as in `Turn`.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    limit: int
    output_start: int = 0
    source_slot: int | None = None
    grammar: Matcher | None = None
    tally: Tally | None = None


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token as a draft model chose it.

    Attributes:
        runner_up: what it would have chosen next, under the same noise; None if it was not asked.
        margin: by how much the token's score exceeds the runner-up's: logits, or log-probabilities with noise.
        is_forced: a grammar left no choice: it cost no pass.
    """

    token_id: int
    runner_up: int | None = None
    margin: float = math.inf
    is_forced: bool = False


class Proposer(Protocol):
    """Extends chains of draft tokens; runs on a model thread.

    Attributes:
        max_length: longest chain, committed tokens included, that can be extended by one.
    """

    num_slots: int
    max_length: int

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        """Take one step for every draft.

        Args:
            ranked: runner-ups and margins are wanted too, of a proposer that has them.

        Returns:
            Per draft, its next 1 .. limit tokens; an empty list if there is nothing to propose; None if the step was
            spent on reading a part of a long prompt, and more steps are needed.
        """


Decide = Callable[[Sequence[Turn], Array], list[Verdict]]
"""Chooses tokens and verifies proposals, from logits: `inference.speculation.slot_decoder.decide`, for lower layers."""


@runtime_checkable
class CompiledShapes(Protocol):
    """A backend whose passes are compiled graphs of fixed widths.

    Attributes:
        max_pass_tokens: tokens of one span that fit into one graph; more are several graphs' work.
        prompt_chunk_tokens: length of the parts in which a long prompt is best read.
    """

    max_pass_tokens: int
    prompt_chunk_tokens: int


@runtime_checkable
class LimitedDecoder(Protocol):
    """A decoder that cannot do all that a request may ask for."""

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that the decoder cannot serve."""


@runtime_checkable
class Identified(Protocol):
    """A backend that can say on what arithmetic its logits depend, as it was resolved and not as it was asked for.

    Attributes:
        arithmetic: backend, dtype, kind of device, levels of quantization: unlike replicas do not resume each other.
    """

    arithmetic: str


@runtime_checkable
class ForkingBackend(Protocol):
    """A backend that copies what one slot holds to another."""

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1; what the destination held elsewhere stays."""


@runtime_checkable
class RereadingBackend(Protocol):
    """A backend that reads a whole prompt so fast that what its slots hold already is of use only at times."""

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        """Whether reading a prompt of `num_tokens` behind its first `num_held`, which a slot holds, was measured to
        take less time than reading all of it; False while nothing is known."""


@runtime_checkable
class PrefixKeeper(Protocol):
    """A decoder or proposer whose slots keep what they hold between sequences, so that the next may begin behind it."""

    @property
    def slots(self) -> Backend | None:
        """Whose slots they are; None: sequences must not begin with what is there."""

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Give a slot to a new sequence, which begins with `token_ids`, as `source_slot` holds them.

        On the model thread, not during a step. No token at all: what the slot holds is of no use to the sequence.
        """


@runtime_checkable
class BranchingProposer(Protocol):
    """A proposer with slots for branches beside the chain, `num_branches` for each of its own slots.

    Slot s of the sequences has the slots num_slots + s * num_branches + b for b = 0 .. num_branches - 1.
    """

    num_branches: int


class CompiledDecoder(Decoder, Protocol):
    """A decoder that is a model of its own, not made of slot models: draft, target and verdict in one graph.

    Attributes:
        slot_bytes: memory of one slot's keys and values, in bytes.
    """

    slot_bytes: int


def prompt_chunk_tokens(backend: object) -> int:
    """In what parts a backend wants long prompts; 0 if it does not care."""
    return backend.prompt_chunk_tokens if isinstance(backend, CompiledShapes) else 0


def max_pass_draft_tokens(model: object, default: int) -> int:
    """Draft tokens that fit into one pass behind the last committed token, `default` at most."""
    return min(default, model.max_pass_tokens - 1) if isinstance(model, CompiledShapes) else default


@runtime_checkable
class SeedAware(Protocol):
    """A decoder or engine that says whether equal seeds give equal tokens."""

    seed_invariant: bool


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
            "seed: this server samples on the device, where equal seeds give other tokens: omit it", field="seed"
        )


def goes_on(backend: object, num_held: int, num_tokens: int) -> bool:
    """Whether a backend had better read a prompt behind its first `num_held` tokens, which a slot holds."""
    return backend.goes_on(num_held, num_tokens) if isinstance(backend, RereadingBackend) else True


def num_branches(proposer: object) -> int:
    """How many branches of each sequence a proposer has room for."""
    return proposer.num_branches if isinstance(proposer, BranchingProposer) else 0


def check_request(decoder: Decoder, request: GenerationRequest) -> None:
    """Let a decoder refuse what it cannot do.

    Raises:
        InvalidRequestError: naming what it is.
    """
    if isinstance(decoder, LimitedDecoder):
        decoder.check(request)
    if request.grammar is not None and not decoder.keeps_grammars:
        fault = f"grammar: {type(decoder).__name__} chooses tokens in a compiled graph, which cannot keep to one"
        raise InvalidRequestError(f"{fault}: use --speculation_method vanilla", field="grammar")
