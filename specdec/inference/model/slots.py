"""Slot models: backends that keep sequences in slots and run them through one model; and abilities of some."""

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
    """A causal language model with a fixed number of slots, each of which holds one sequence.

    A span writes its positions, and overwrites what they held. Each token sees its own sequence up to its own position
    and nothing after it. So a caller rolls a slot back by starting earlier, and reuses it by starting at 0.

    One thread at a time calls `forward`; the attributes are constants that any thread reads. A backend may also have
    `arithmetic`, a text that names backend, dtype, kind of device and levels of quantization: a server continues
    another server's answer only if both texts are equal. A bigram model keeps nothing in its slots, and is a complete
    backend:

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
    """A backend that copies the content of one slot to another."""

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1; other positions of the destination stay as they are."""


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Numbers of graphs that a backend has made for its passes: of all, and of those made only after its warm-up."""

    num: int
    num_late: int


@runtime_checkable
class GraphMaker(Protocol):
    """Backend that may make graphs of its passes, as a rule all of them before it serves."""

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made for the passes."""


@runtime_checkable
class CompiledBackend(Protocol):
    """A backend that may run passes as compiled graphs of fixed widths.

    Attributes:
        max_pass_tokens: most tokens of one span in one call of a graph; a longer span takes several calls.
        prompt_chunk_tokens: number of tokens per part at which a long prompt is read fastest; 0: any.
    """

    @property
    def max_pass_tokens(self) -> int: ...

    @property
    def prompt_chunk_tokens(self) -> int: ...

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        """Return whether a prompt of `num_tokens` should reuse the first `num_held` tokens that a slot holds.

        It should if this is faster than reading the whole prompt. The event loop calls this method, also during a pass.
        """


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of positions, each of which begins at a multiple of its width.

    Attributes:
        width: positions of a window.
        num: windows of one pass; more take another pass.
    """

    width: int
    num: int

    def count(self, start: int, end: int) -> int:
        """Return how many windows the positions start .. end-1 are in."""
        return (end - 1) // self.width - start // self.width + 1


@runtime_checkable
class WindowedBackend(Protocol):
    """Backend that may compute spans as whole windows, so that logits are the same bits whatever else a pass has.

    Attributes:
        windows: windows of its passes; None if it runs spans as they come.
    """

    @property
    def windows(self) -> Windows | None: ...


@runtime_checkable
class PrefixKeeper(Protocol):
    """Decoder or proposer with slots that keep their content, so that the next sequence can begin with it."""

    @property
    def slots(self) -> Backend | None:
        """Return the backend that has the slots; None if no sequence may reuse their content."""

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Give a slot to a new sequence; `source_slot` has its first tokens, `token_ids`, cached.

        The engine calls this on the model's thread, between steps. If `token_ids` is empty, nothing is cached.
        """


def prompt_chunk_tokens(backend: object) -> int:
    """Return the number of tokens per part at which a backend reads long prompts fastest; 0: any number."""
    return backend.prompt_chunk_tokens if isinstance(backend, CompiledBackend) else 0


def max_pass_draft_tokens(backend: object, default: int) -> int:
    """Return how many draft tokens one pass can verify after the last committed token, at most `default`."""
    return min(default, backend.max_pass_tokens - 1) if isinstance(backend, CompiledBackend) else default
