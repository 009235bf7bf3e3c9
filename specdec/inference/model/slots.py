"""Contract of backends, which keep sequences in slots and run them through one model, with their optional abilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

Array: TypeAlias = Any
"""A numpy array or a torch tensor; functions that take one return the same kind, on the same device."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, to be run through a model in one pass.

    Attributes:
        slot: room for the sequence's keys and values, 0 <= slot < num_slots.
        start: absolute position of the first token; all positions before it have been written to the slot.
        token_ids: one or more ids, each below the vocabulary's size.
        num_logits: number of last tokens for which logits are wanted, 0 <= num_logits <= len(token_ids).
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int


class Backend(Protocol):
    """Causal language model with a fixed number of slots, each of which holds one sequence.

    A span writes its positions, and overwrites what they held. Each token sees its own sequence up to its own position
    and nothing after it. So a caller rolls a slot back by starting earlier, and reuses it by starting at 0.

    One thread at a time calls `forward`; the attributes are constants that any thread reads. A backend may also have
    `arithmetic`, a text that names backend, dtype, kind of device and levels of quantization: a server continues
    another server's answer only if both texts are equal. One that always computes whole windows of positions, so that
    logits do not depend on what else is in a pass, has them as `windows`. A bigram model keeps nothing in its slots,
    and is a complete backend:

        class Bigrams:
            num_slots, max_length, slot_bytes = 4, 1024, 0

            def __init__(self, logits: np.ndarray) -> None:  # float32 [vocab_size, vocab_size]
                self.logits, self.vocab_size = logits, len(logits)

            def forward(self, spans: Sequence[Span]) -> Array:
                wanted = [span.token_ids[len(span.token_ids) - span.num_logits :] for span in spans]
                return self.logits[[*itertools.chain(*wanted)]]

    Attributes:
        vocab_size: number of columns of the logits.
        num_slots: number of sequences that can be held at once.
        max_length: number of positions of a slot.
        slot_bytes: size of one slot's keys and values, in bytes.
    """

    vocab_size: int
    num_slots: int
    max_length: int
    slot_bytes: int

    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over one or more spans of distinct slots.

        Returns:
            float32 logits [sum of num_logits, vocab_size]: the rows of the first span, then those of the second, ...
            A span's i-th row is for the token that follows the i-th of its last `num_logits` tokens.

        Raises:
            ValueError: the spans break this contract; `specdec.inference.backends.spans.check_spans` checks them.
        """


@runtime_checkable
class ForkingBackend(Protocol):
    """Backend that can copy the content of one slot to another."""

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1; other positions of the destination stay as they are."""


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Numbers of compiled or captured graphs that a backend has made for its passes.

    Attributes:
        num: all graphs.
        num_late: those that were made after the backend's warm-up, while requests waited.
    """

    num: int
    num_late: int


@runtime_checkable
class GraphMaker(Protocol):
    """Backend that may compile or capture its passes as graphs, as a rule before it serves."""

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made so far."""


@runtime_checkable
class CompiledBackend(Protocol):
    """Backend that may run passes as compiled graphs for fixed numbers of tokens.

    Attributes:
        max_pass_tokens: most tokens of one span in one call of a graph; a longer span takes several calls.
        prompt_chunk_tokens: number of tokens per part at which a long prompt is read fastest; 0 if it does not matter.
    """

    @property
    def max_pass_tokens(self) -> int: ...

    @property
    def prompt_chunk_tokens(self) -> int: ...

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        """Return whether a prompt of `num_tokens` tokens should reuse its first `num_held` ones, which a slot holds.

        It should if that is faster than reading the whole prompt. The event loop calls this method, also during a pass.
        """


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows, runs of positions that a backend always computes whole; each begins at a multiple of the width.

    Attributes:
        width: number of positions in a window.
        num: number of windows that one pass computes; more windows take another pass.
    """

    width: int
    num: int

    def count(self, start: int, end: int) -> int:
        """Return how many windows the positions start .. end-1 lie in."""
        return (end - 1) // self.width - start // self.width + 1


@runtime_checkable
class PrefixKeeper(Protocol):
    """Decoder or proposer whose slots keep their content, so that a later sequence can reuse a prefix of it."""

    @property
    def slots(self) -> Backend | None:
        """Return the backend that has the slots; None if no sequence may reuse their content."""

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Prepare a slot for a new sequence; called on the model's thread, between steps.

        Args:
            slot: the sequence's slot.
            source_slot: slot that has the sequence's first tokens cached: `slot` itself, or another one to copy from.
            token_ids: these first tokens; empty if none are cached.
        """


def prompt_chunk_tokens(backend: object) -> int:
    """Return the number of tokens per part at which a backend reads long prompts fastest; 0 if it does not matter."""
    return backend.prompt_chunk_tokens if isinstance(backend, CompiledBackend) else 0


def max_pass_draft_tokens(backend: object, default: int) -> int:
    """Return how many draft tokens one pass of a backend can verify for a sequence, at most `default`."""
    return min(default, backend.max_pass_tokens - 1) if isinstance(backend, CompiledBackend) else default
