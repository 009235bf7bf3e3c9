"""Frames: the messages of the mailbox between a front (this project's server or pool) and vLLM's engine cores.

A frame is the length of its body, in 4 bytes with the lowest first, and the body, in msgpack with bounds. The first one
of a link is the core's `Hello`. Nothing here executes what it reads, as pickle would.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Annotated, Any, TypeAlias

import msgspec

from specdec.inference.errors import SpecDecError
from specdec.inference.request import Noise
from specdec.inference.speculation.tree import MAX_NUMBERS, MAX_TREE_TOKENS, Branch

VERSION = 5
"""Version of the message format between vLLM's engine cores and this project; both ends must have the same."""
MAX_FRAME_BYTES = 1 << 25
"""Most bytes of a message: one with a tokenizer has up to 16 MiB, and one with a prompt 5 bytes per token."""
LENGTH = struct.Struct("<I")
MAX_ROWS = 65536
_CREDENTIALS = struct.Struct("3i")  # of the kernel: process, user and group of a socket's other end

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""Name of a request in messages: the id of its session at this project's server or pool."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
TokenIds: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_TREE_TOKENS)]
AllTokenIds: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=1 << 22)]
"""Token ids of a whole request, its prompt and its output."""


class FrameError(SpecDecError):
    """Error of a message (frame) that is malformed or comes at the wrong time; the connection is closed then."""


class Served(msgspec.Struct, frozen=True):
    """Description of the model in a core that vLLM's own server started, for a pool.

    Attributes:
        name: name of the model.
        tokenizer: tokenizer, as `Tokenizer.packed` returns it.
        ends: ids of end-of-sequence tokens.
        max_length: most tokens of a request.
        num_slots: most requests in a pass.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md), for all requests.
    """

    name: str
    tokenizer: bytes
    ends: TokenIds
    vocab_size: Count
    max_length: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    noise: Noise = Noise.SPECDEC


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of an engine core: the version of its messages, and its model's id.

    In a message to a pool, `served` describes the model; to this project's server it is None.
    """

    version: Count
    model_id: Name
    served: Served | None = None


class Wanted(msgspec.Struct, frozen=True):
    """Request in a core that gets requests from vLLM's own server, with what a draft worker needs of it.

    Attributes:
        token_ids: prompt, and output up to now.
        output_start: position of the first output token.
        max_new_tokens: most output tokens from now on.
        gamma: most draft tokens of a pass.
        sampling: fields of `SamplingParams`; empty for the greedy choice.
    """

    token_ids: AllTokenIds
    output_start: Count
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    gamma: Count
    sampling: dict[str, Any]


class Has(msgspec.Struct, frozen=True, tag="has"):
    """Message of an engine core: a request has arrived, and its draft tokens may be sent from now on.

    Attributes:
        wanted: the request, in a message to a pool; None in one to this project's server, which has sent the request.
    """

    name: Name
    wanted: Wanted | None = None


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Message of an engine core: a request of a vLLM client has ended; all of its passes have been reported before."""

    name: Name


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request's part in the report on a pass: the tokens that were committed, and the counts of draft tokens.

    Attributes:
        position: absolute position of the first of `num_tokens` tokens.
        num_drafts: draft tokens that the pass verified.
        num_accepted: number of these that the target accepted.
        help: number of the draft worker, as in `Help`, that the counts of received tokens belong to; 0 if none drafts.
        num_received: draft tokens received from that worker so far; 0 if none came since the row before.
        hold_us: microseconds from the arrival of the last of them to this row; 0 if `num_received` is 0.
        rejected: draft tokens that the pass rejected.
        is_lookup: the draft tokens were looked up, in the request's own tokens or in a text that they may repeat.
        is_finite: False for a pass whose logits were not finite, so that its tokens mean nothing.
        token_ids: the tokens themselves, where the other end does not have them from vLLM.
        is_predicted: the draft tokens are of the request's prediction.
        num_plain: passes that decoding without a draft model would have taken for the tokens.
    """

    name: Name
    position: Count
    num_tokens: Count
    num_drafts: Count = 0
    num_accepted: Count = 0
    help: Count = 0
    num_received: Count = 0
    hold_us: Count = 0
    rejected: TokenIds = []
    is_lookup: bool = False
    is_finite: bool = True
    token_ids: TokenIds = []
    is_predicted: bool = False
    num_plain: Annotated[float, msgspec.Meta(ge=0, le=2**40)] = 1.0


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """Report of an engine core on one pass.

    Attributes:
        us: microseconds that the pass took.
        num_prompt_tokens: tokens of prompts that the pass read.
        num_running: number of requests that hold memory in the core; others wait for it.
        rows: tokens and counts of each request in the pass.
        period_us: microseconds from the end of the pass before to that of this one; 0 if the core was idle meanwhile.
    """

    us: Count
    num_prompt_tokens: Count
    num_running: Count
    rows: Annotated[list[Row], msgspec.Meta(max_length=MAX_ROWS)]
    period_us: Count = 0


class Help(msgspec.Struct, frozen=True, tag="help"):
    """Message to an engine core: a request has another draft worker, or none any more.

    Attributes:
        help: number that marks the present worker and its draft tokens, higher at each change; None: it decodes alone.
    """

    name: Name
    help: Count | None


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Message to an engine core: draft tokens for a request."""

    name: Name
    branches: Annotated[list[Branch], msgspec.Meta(max_length=MAX_NUMBERS)]  # one message of a worker has fewer


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Message to an engine core: stop verifying tokens of draft workers if `is_on`, else verify them again."""

    is_on: bool


FromCore: TypeAlias = Hello | Has | Passed | Gone
ToCore: TypeAlias = Help | Grow | Hold

_encoder = msgspec.msgpack.Encoder()
_from_core = msgspec.msgpack.Decoder(FromCore)
_to_core = msgspec.msgpack.Decoder(ToCore)


def packed(frame: FromCore | ToCore) -> bytes:
    """Return a message as bytes: the length of its body, then the body."""
    body = _encoder.encode(frame)
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Return the bytes of a message's body, by the 4 bytes `head` before it; raise FrameError if they are too many."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is above {MAX_FRAME_BYTES}")
    return int(length)


def from_core(body: bytes) -> FromCore:
    """Decode the body of a message from an engine core; raise FrameError if it is malformed."""
    try:
        return _from_core.decode(body)
    except (ValueError, RecursionError) as exc:  # msgspec.DecodeError is a ValueError, as text that is not valid UTF-8
        raise FrameError(f"no frame of a core: {exc}") from exc


def to_core(body: bytes) -> ToCore:
    """Decode the body of a message to an engine core; raise FrameError if it is malformed."""
    try:
        return _to_core.decode(body)
    except (ValueError, RecursionError) as exc:  # msgspec.DecodeError is a ValueError, as text that is not valid UTF-8
        raise FrameError(f"no frame of a front: {exc}") from exc


def require_own_user(link: socket.socket) -> None:
    """Raise FrameError unless the process at the other end of a unix socket belongs to this process's user."""
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise FrameError(f"a process of user {user} is at the other end, this one is of user {os.geteuid()}")
