"""Contract of decoders: one step takes a `Turn` of each of many sequences, and returns a `Verdict` for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from specdec.inference.commit import NO_OWN_DRAFTS, OwnDrafts, TokenAudit, TokenLogprobs
from specdec.inference.errors import InvalidRequestError, SpecDecError
from specdec.inference.model.slots import Array
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.tokens import Tally


class Matcher(Protocol):
    """Compiled grammar, which decides which tokens may follow the output of one sequence.

    Callers pass the whole output each time: the committed tokens after the prompt, and draft tokens that are to count
    as if they were committed. One thread at a time uses a matcher.
    """

    def num_allowed(self, output: Sequence[int], proposal: Sequence[int]) -> int:
        """Return how many of the proposal's first tokens the grammar accepts.

        Masks may allow fewer tokens: where the grammar forces a text, they exclude tokens that cover only its
        beginning.

        Raises:
            InternalError, InvalidRequestError: the grammar refuses an output that it had allowed, or is too complex.
        """

    def masks(self, output: Sequence[int], proposal: Sequence[int]) -> list[bytes | None]:
        """Return which tokens are allowed in each of the len(proposal) + 1 rows of logits that verify a proposal.

        Returns:
            Per row, one bit per token id, the lowest bit of the first byte first. None for a row after a token of the
            proposal that is refused or ends the sequence: no token of that row can be committed. If the grammar becomes
            too complex within the proposal, the list is shorter: no token may be committed for the missing rows.

        Raises:
            InternalError: as `num_allowed`.
            InvalidRequestError: the grammar is too complex for the first mask.
        """

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow; none if several may, or the grammar refuses the output."""

    def goes_on(self, output: Sequence[int]) -> bool:
        """Return whether the grammar allows the output and lets it continue."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part in a target pass: tokens to write, and draft tokens to verify.

    Attributes:
        slot: the sequence's slot.
        start: number of the sequence's tokens that the slot holds already.
        token_ids: the committed tokens, up to the last one that this pass writes: all of them, unless the turn reads a
            part of a longer prompt. Not changed while the pass runs.
        sampling: how tokens are chosen.
        proposal: draft tokens to verify after `token_ids`; empty if there are none.
        gamma: number of draft tokens that a decoder with a draft model of its own may add if the proposal is empty.
        drafts: False if a decoder with a draft model of its own must add none of its tokens to this turn.
        chooses: False for a part of a prompt that ends before its last token: no token is chosen.
        output_start: position of the sequence's first output token; penalties distinguish prompt and output by it.
        logprobs: as in `GenerationRequest`.
        scored: prompt tokens for which log-probabilities are wanted: those after `start` that this pass can score.
        prompt_logprobs: number of best tokens for which log-probabilities are wanted at the position of each scored
            token.
        audits: True if the scored tokens from `output_start` on are compared with the target's choices, instead of
            getting log-probabilities.
        grammar: the grammar that binds the output; None: any output is allowed.
        lookup: proposal for a turn without draft tokens, from prompt lookup: the tokens that followed an earlier
            occurrence of the last ones.
        tally: token counts for penalties, kept between passes; None: count again. Used only on the thread that runs
            passes.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    proposal: Sequence[int] = ()
    gamma: int = 0
    drafts: bool = True
    chooses: bool = True
    output_start: int = 0
    logprobs: int | None = None
    scored: Sequence[int] = ()
    prompt_logprobs: int = 0
    audits: bool = False
    grammar: Matcher | None = None
    lookup: Sequence[int] = ()
    tally: Tally | None = None

    @property
    def num_unread(self) -> int:
        """Return how many committed tokens the pass writes: 1 while decoding, more while a prompt is read."""
        return len(self.token_ids) - self.start


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a pass for one sequence: the tokens to commit, with their counts.

    Attributes:
        token_ids: the tokens to commit: accepted draft tokens, then one of the target's own.
        num_draft_tokens: number of draft tokens that were verified.
        num_accepted_tokens: number of draft tokens that were accepted.
        draft_us: microseconds that the decoder's own draft took.
        logprobs: log-probabilities of each of `token_ids`, if the turn asked for them.
        prompt_logprobs: log-probabilities of each token that the turn had scored.
        audits: comparisons of the scored tokens with the target's choices, if the turn asked for them.
        error: why the sequence cannot go on; None if it can. With an error there are no tokens.
        own: counts of the draft tokens that the target proposed itself, by lookup or grammar.
        rejected_token_ids: draft tokens that were rejected; empty if a device does not return them.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_us: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    audits: tuple[TokenAudit, ...] = ()
    error: SpecDecError | None = None
    own: OwnDrafts = NO_OWN_DRAFTS
    rejected_token_ids: tuple[int, ...] = ()

    @property
    def of_draft(self) -> tuple[int, int]:
        """Return how many tokens of a draft model were verified, and how many of these were accepted."""
        return self.num_draft_tokens - self.own.num_tokens, self.num_accepted_tokens - self.own.num_accepted


Decide: TypeAlias = Callable[[Sequence[Turn], Array], list[Verdict]]
"""Type of `specdec.inference.speculation.slot_decoder.decide`, which chooses tokens from logits and verifies proposals.
Layers below speculation cannot import that function, so they get it as an argument."""


class Decoder(Protocol):
    """Target model that advances many sequences in one step, each by at least one token.

    One thread calls `step`; the attributes are constants that any thread reads. Each token must follow only from the
    tokens before it and the request's seed, never from the proposal, the other turns, or repetitions of a turn. A
    decoder that always chooses token 0, and verifies nothing, is complete:

        class Zeros:
            vocab_size, num_slots, max_length = 100, 8, 4096
            prompt_chunk_tokens, keeps_grammars = 0, False

            def step(self, turns: Sequence[Turn]) -> list[Verdict]:
                return [Verdict((0,) if turn.chooses else (), 0, 0) for turn in turns]

    Attributes:
        vocab_size: number of tokens that the decoder chooses from.
        num_slots: number of sequences that can be held at once.
        max_length: number of tokens that prompt and output may have together.
        prompt_chunk_tokens: number of tokens per part at which a long prompt is read fastest; 0: any number.
        keeps_grammars: True if the tokens keep to the grammar of their turn.
    """

    vocab_size: int
    num_slots: int
    max_length: int
    prompt_chunk_tokens: int
    keeps_grammars: bool

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Return one verdict per turn, in order; the slots of the turns are distinct.

        A turn that does not choose gets no tokens. Positions from a turn's `start` on are written, and overwrite what
        the slot held there.

        After an exception the engine runs each sequence again, from `start` 0.
        """


@runtime_checkable
class CompiledDecoder(Decoder, Protocol):
    """Decoder that is one compiled graph, which also chooses the tokens, and that cannot serve every request.

    Attributes:
        slot_bytes: size of one slot's keys and values, in bytes.
    """

    slot_bytes: int

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that the decoder cannot serve; called on the event loop."""


def is_seed_invariant(model: object) -> bool:
    """Return whether equal seeds give equal tokens: True, unless the model has `seed_invariant` = False."""
    return bool(getattr(model, "seed_invariant", True))


def check_seed(generator: object, sampling: SamplingParams) -> None:
    """Raise InvalidRequestError for a seed if equal seeds may give other tokens here; greedy requests always pass.

    Args:
        generator: decoder or other object that chooses the tokens, see `is_seed_invariant`.
        sampling: sampling parameters of a request with a seed.
    """
    if not sampling.greedy and not is_seed_invariant(generator):
        raise InvalidRequestError(
            "seed: this server samples on the device, where equal seeds give other tokens: omit it", field="seed"
        )


def check_request(decoder: Decoder, request: GenerationRequest) -> None:
    """Raise InvalidRequestError for a request that the decoder cannot serve; the error names the parameter."""
    if isinstance(decoder, CompiledDecoder):
        decoder.check(request)
    if request.grammar is not None and not decoder.keeps_grammars:
        fault = f"grammar: {type(decoder).__name__} chooses tokens in a compiled graph, which cannot keep to one"
        raise InvalidRequestError(f"{fault}: use --speculation_method vanilla", field="grammar")
