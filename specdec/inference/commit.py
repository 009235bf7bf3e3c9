"""Events of an answer, from engines and for clients: which tokens became final, at what cost, and why the output ended.

A commit is the tokens that became final in one pass of the target.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from specdec.inference.request import UNKNOWN, GenerationRequest, Provenance, RequestDefaults


class FinishReason(enum.Enum):
    """Reason why an output ended."""

    STOP = "stop"  # a stop token was committed
    LENGTH = "length"  # max_new_tokens or the context limit was reached


class TokenLogprob(NamedTuple):
    """Token and its log-probability.

    Attributes:
        logprob: natural logarithm of the token's probability by the model's raw logits: before bias, penalties,
            temperature and truncation.
        text: the token's bytes; empty if they are not known.
    """

    token_id: int
    logprob: float
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, then of the most probable ones, best first.

    They are stored in columns, not as one object for each token: such objects for a few long prompts delayed all
    requests by 0.1 s in every full garbage collection, which looks at a tuple of numbers only once.

    Attributes:
        token_ids, logprobs, texts: columns of the fields of `TokenLogprob`; `texts` is empty until a completer with a
            tokenizer adds them.
        num_characters: characters that the chosen token adds to the text, counting those that are held back since they
            may begin a stop string; 0 until a completer adds the number. The token's bytes do not give it, since those
            of a special token are its name.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    texts: tuple[bytes, ...] = ()
    num_characters: int = 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        """Yield the chosen token, then the most probable ones."""
        return map(TokenLogprob, self.token_ids, self.logprobs, self.texts or itertools.repeat(b""))


@dataclass(frozen=True, slots=True)
class Timings:
    """Parts of the time that one commit took, in microseconds; 0 for a part that is not known here.

    A draft worker is the process with the draft model, where that is not the target's.

    Attributes:
        queue_us: time in which the session was ready for a pass of the target, and was in none.
        compute_us: the target's pass, including the choice of tokens.
        draft_us: the draft model's work on the proposal, including the wait for its passes.
        network_us: the messages' time on the network to the target and back, measured by the draft worker.
        round_trip_us: latest estimate of a round trip between draft worker and target.
        step_us: latest estimate of one step of the draft worker's model.
    """

    queue_us: int = 0
    compute_us: int = 0
    draft_us: int = 0
    network_us: int = 0
    round_trip_us: int = 0
    step_us: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a draft worker (the process with the draft model) for one commit; 0 for a count that is not known.

    Attributes:
        bytes_up, bytes_down: bytes of messages from draft worker to target, and back, since the previous commit.
        num_branch_hits: 1 if the target rejected a token of the draft's chain (its best guess) and chose a token that
            begins a branch, an alternative that was drafted too; else 0.
        num_wasted_tokens: draft tokens that were dropped, since the commit differs from them.
        window: limit of draft tokens past the committed ones, from this commit on.
        max_branches: limit of such branches, from this commit on.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    num_branch_hits: int = 0
    num_wasted_tokens: int = 0
    window: int = 0
    max_branches: int = 0


NOTHING_COUNTED = Counts()


@dataclass(frozen=True, slots=True)
class OwnDrafts:
    """Numbers of draft tokens in one pass that the target proposed itself, and of those that it accepted.

    Attributes:
        num_lookup_tokens, num_lookup_accepted: tokens that lookup found in the sequence, a prediction or a kept answer.
        num_forced_tokens, num_forced_accepted: tokens at places where a grammar allowed no other. These two numbers
            stay in this process; messages have no fields for them.
        is_predicted: True if the lookup's tokens came from the request's prediction.
    """

    num_lookup_tokens: int = 0
    num_lookup_accepted: int = 0
    num_forced_tokens: int = 0
    num_forced_accepted: int = 0
    is_predicted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_lookup_tokens + self.num_forced_tokens

    @property
    def num_accepted(self) -> int:
        return self.num_lookup_accepted + self.num_forced_accepted

    def cut(self, num_tokens: int, num_accepted_tokens: int) -> OwnDrafts:
        """Return the counts that remain if only the first `num_tokens` tokens of the pass are committed.

        Args:
            num_tokens: number of these tokens, fewer than the pass gave.
            num_accepted_tokens: draft tokens that the target accepted in the whole pass.
        """
        num_lookup = min(self.num_lookup_accepted, num_tokens)
        num_forced = max(0, num_tokens - (num_accepted_tokens - self.num_forced_accepted))  # forced ones come last
        return OwnDrafts(num_lookup, num_lookup, num_forced, num_forced, self.is_predicted)


NO_OWN_DRAFTS = OwnDrafts()


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that became final in one target pass.

    Attributes:
        position: absolute position of the first token in the sequence.
        token_ids: ids in order; empty only in a last commit that carries nothing but the finish reason.
        num_draft_tokens: draft tokens that the pass verified.
        num_accepted_tokens: how many of these the target accepted; they are the first of `token_ids`.
        timings: where the time of the commit went.
        finish_reason: reason why the output ends; None except on its last commit.
        logprobs: one per token, if the request asked for them; else empty.
        num_received_tokens: draft tokens received from the present draft worker so far; 0 if none came since the
            previous commit.
        hold_us: microseconds from the arrival of the last of these tokens to this commit; 0 if none came.
        counts: what the draft worker counted for this commit.
        own: counts of the draft tokens that the target proposed itself, which are among `num_draft_tokens` and
            `num_accepted_tokens`.
        rejected_token_ids: draft tokens that the pass rejected, if the request asked for them; else empty.
        is_held: True if drafting was off, because of `--drafting never` or because passes without drafts were faster.
    """

    position: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    timings: Timings = Timings()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_received_tokens: int = 0
    hold_us: int = 0
    counts: Counts = Counts()
    own: OwnDrafts = NO_OWN_DRAFTS
    rejected_token_ids: tuple[int, ...] = ()
    is_held: bool = False

    @property
    def num_bytes(self) -> int:
        """Return an estimate of the memory that this event takes, in bytes."""
        return 500 + 40 * (len(self.token_ids) + len(self.rejected_token_ids)) + _score_bytes(self.logprobs)


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """Comparison of a token of an output with the target's own choice at the same position.

    Attributes:
        token_id: token of the output.
        choice: token that the target chooses there, by the request's parameters and seed.
        margin: score of the choice minus that of the token. Scores are logits, or with sampling the processed logits
            plus the random numbers of the choice (Gumbel noise). 0 if the token is the choice; infinite if truncation
            or a grammar removes the token.
        rank: 1 plus the number of tokens with a higher score.
    """

    token_id: int
    choice: int
    margin: float
    rank: int

    @property
    def is_choice(self) -> bool:
        return self.token_id == self.choice


@dataclass(frozen=True, slots=True)
class Opened:
    """First event of an engine for a request, before the commits: the results of reading the prompt.

    Attributes:
        num_cached_tokens: prompt tokens that the slot had in its cache, from an earlier request.
        prompt_logprobs: one per prompt token except the first, if the request asked for them; else empty.
        audits: if the request asked for them, one per token of earlier output at the prompt's end, up to the first that
            the request's grammar refuses; else empty.
    """

    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    audits: tuple[TokenAudit, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return an estimate of the memory that this event takes, in bytes."""
        return 500 + _score_bytes(self.prompt_logprobs)


TokenEvent: TypeAlias = Opened | Commit
"""Events of a `TokenSource`: one Opened, then Commits."""


def _score_bytes(scores: tuple[TokenLogprobs, ...]) -> int:
    """Return an estimate of the memory that log-probabilities take, in bytes; all positions count like the first."""
    return 160 * len(scores) * len(scores[0].token_ids) if scores else 0


@dataclass(frozen=True, slots=True)
class Started:
    """First event of an answer, which tells that the request was accepted.

    Attributes:
        seed: seed of the random numbers by which tokens are chosen: the request's, or one that the server drew.
        prompt_text: text of the prompt, if the request asked for an echo; else empty.
        prompt_logprobs: one per prompt token, if the request asked for them; the value of the first has no meaning.
        has_grammar: True if the output will keep to the grammar that the request asked for.
        num_cached_tokens: prompt tokens that were not computed again.
        provenance: origin of the output.
        defaults: the server's values for parameters that the request left open; None if it left none open.
        adapter: adapter that the output is computed with, as the request names it.
        audits: one per token of the output that the request gave to be audited; fewer if its grammar refuses one, which
            is the last then.
    """

    num_prompt_tokens: int
    seed: int
    prompt_text: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    has_grammar: bool = False
    num_cached_tokens: int = 0
    provenance: Provenance = UNKNOWN
    defaults: RequestDefaults | None = None
    adapter: str = ""
    audits: tuple[TokenAudit, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta(Commit):
    """Commit, the tokens that became final in one target pass, with their text.

    The last one of an answer may have text, but no token. `position` is -1 if a server sent none.

    Attributes:
        piece_lengths: for each token, how many characters it adds to `text`.
        rejected_text: text of the draft tokens that the pass rejected, in place of their ids.
    """

    text: str = ""
    piece_lengths: tuple[int, ...] = ()
    rejected_text: str = ""

    def pieces(self) -> list[str]:
        """Return the texts that the tokens add, in their order."""
        ends = list(itertools.accumulate(self.piece_lengths, initial=0))
        return [self.text[start:end] for start, end in itertools.pairwise(ends)]

    def marked(self) -> Iterator[tuple[str, bool]]:
        """Yield the parts of the text, each with True if it comes from an accepted draft token, else False.

        A pass commits its accepted draft tokens first, then one token of the target's own.
        """
        pieces = self.pieces()
        for index, piece in enumerate(pieces):
            yield piece, index < self.num_accepted_tokens
        if rest := self.text[sum(self.piece_lengths) :]:
            yield rest, False


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer, which tells that the output is complete, and why it ended."""

    reason: FinishReason


TextEvent: TypeAlias = Started | Delta | Finished
"""Events of an answer: one Started, any number of Deltas, one Finished."""


class TokenSource(Protocol):
    """Interface of what computes the tokens for a tokenized request: an engine, or the pool of draft workers around it.

    All methods run on the event loop, and compute nothing there. Requests are independent of each other: any number of
    iterators may be open, each read by one task.

        async with aclosing(generator.generate(GenerationRequest((5, 6, 7), max_new_tokens=8))) as events:
            async for event in events:
                if isinstance(event, Commit):
                    print(event.position, event.token_ids)
    """

    @property
    def max_length(self) -> int:
        """Return the most tokens that prompt and output can have together."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; each id is less."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield one Opened, then Commits up to one with a finish_reason; closing the iterator frees the request's slot.

        There is no gap between commits: the first has the position behind the prompt, each later one the position
        behind the tokens before it. Tokens depend on nothing but model, prompt, parameters and seed.

        Raises:
            InvalidRequestError: the request does not fit this model, before any event; or its grammar is too complex.
            CapacityError: slots and queue are full, before any event; or too many events wait to be read.
            UnavailableError: the engine is stopping, or it is lost.
            InternalError: the model failed on this request.
        """
