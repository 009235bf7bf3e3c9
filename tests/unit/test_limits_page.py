"""The documentation page about reliability names the limits that the code has."""

from __future__ import annotations

import pytest

from specdec.grpc_comm import guard, health, options
from specdec.inference.caller import MAX_LINE_CHARACTERS
from specdec.inference.config import DEFAULT_WORKER_SLOTS, ROOT
from specdec.inference.engine.pool import MAX_WORKERS
from specdec.inference.gateway.door import middleware, protocol
from specdec.inference.request import MAX_LOGPROBS
from specdec.inference.speculation.tree import MAX_TREE_TOKENS
from specdec.inference.text import grammar_trial
from specdec.inference.workers.calls import convert
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES
from specdec.inference.workers.drafting import service, stream

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
SHARES = {2: "a half", 4: "a quarter", 8: "an eighth", 16: "a sixteenth"}
MIB, KIB = 1 << 20, 1 << 10


@pytest.mark.parametrize(
    "words",
    [
        f"names of {2 * DRAFT_SESSION_BYTES} hexadecimal digits, {MAX_TREE_TOKENS} tokens of each",
        f"many private workers | {MAX_WORKERS}, and for a client {SHARES[service.PRIVATE_SHARE]} of what it",
        f"messages to a pool worker | {service.MAX_OUTBOX}, {service.MAX_OUTBOX_BYTES // MIB} MiB",
        f"messages of a pool worker to its target | {stream.MAX_OUTBOX} |",
        f"up to `--max_worker_slots` ({DEFAULT_WORKER_SLOTS})",
        f"of one `Propose` | {convert.MAX_TOKENS_OF_MESSAGE} in all, {MAX_TREE_TOKENS} a branch",
        f"{convert.MAX_TOKENS_OF_PASS} tokens, {MAX_LOGPROBS} alternatives of each, "
        f"{convert.MAX_CHARACTERS_OF_PASS // KIB} Ki characters",
        f"names in a server's card | {convert.MAX_NAME_CHARACTERS} characters",
        f"the name of a session, from a target | {convert.MAX_NAME_CHARACTERS} characters",
        f"a line of the log | {MAX_LINE_CHARACTERS:,} characters",
        f"{grammar_trial.TRIAL_CPU_S} s of a core, {grammar_trial.TRIAL_BYTES >> 30} GiB; "
        f"{grammar_trial.TRIAL_WALL_S:g} s by the clock while another account waits",
        f"a request message | {options.MIN_REQUEST_BYTES // KIB} KiB",
        f"gRPC connections | {options.MAX_CONNECTIONS} |",
        f"streams of a gRPC connection | {options.MAX_STREAMS_PER_CONNECTION} |",
        f"calls that arrive at once | {options.MAX_PENDING_CALLS:,};",
        f"whose first message has not arrived | {guard.MAX_WAITING}, {guard.FIRST_MESSAGE_S:g} s",
        f"watchers of health | {health.MAX_WATCHERS} |",
        f"a request of health or reflection | {guard.MAX_HEALTH_REQUEST_BYTES // KIB} KiB",
        f"{protocol.HEADERS_TIMEOUT_S:g} s to the end of its headers, {protocol.BODY_TIMEOUT_S:g} s to the end",
        f"{protocol.MAX_PIPELINED} requests that wait for answers; {protocol.MAX_CONNECTIONS} connections",
        f"extensions of chunks | {protocol.MAX_HEADERS}, {protocol.MAX_HEADER_BYTES // KIB} KiB",
        f"bodies that have begun and not ended | {middleware.MAX_UNFINISHED_BYTES // MIB} MiB in a process",
    ],
)
def test_a_limit_is_the_codes(words: str) -> None:
    """Each limit that the page about reliability names is the code's.

    Regression: the page had 4,096 as the number of draft tokens kept before their request comes; the code keeps 256.
    """
    assert words in PAGE
