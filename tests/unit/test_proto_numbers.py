"""Numbers in the .proto's comments equal the numbers in the code."""

from __future__ import annotations

import re

import pytest

from specdec.inference import request
from specdec.inference.config import ROOT
from specdec.inference.request import BIAS, GAMMA, MAX_NEW_TOKENS, RANGES, SamplingParams
from specdec.inference.settings import Range
from specdec.inference.speculation.tree import MAX_TREE_TOKENS
from specdec.inference.text import chat, stop_strings
from specdec.inference.text.tokenizer import MAX_PACKED_BYTES
from specdec.inference.text.vocabulary import MAX_VOCAB_SIZE
from specdec.inference.workers.calls import convert
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES
from specdec.inference.workers.drafting.service import MAX_WORKER_SLOTS

PROTO = (ROOT / "protos" / "specdec" / "v1" / "specdec.proto").read_text()
ELEMENT = re.compile(r"(?:message|enum|service|rpc|oneof) (\w+)|(\w+) = ")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ONE = 1
"""The least size of a list that must not be empty, and the least number of anything that must exist."""


def ends(limits: Range) -> tuple[float, float]:
    return limits.low, limits.high


def sampled(name: str, *default: float) -> dict[str, tuple[float, ...]]:
    return {f"SamplingParams.{name}": (*ends(RANGES[name]), *default)}


NONE = SamplingParams()
LOGPROBS = (0, request.MAX_LOGPROBS)
TIED: dict[str, tuple[float, ...]] = {
    **sampled("temperature"),
    "SamplingParams.top_k": (NONE.top_k,),
    **sampled("top_p", NONE.top_p),
    **sampled("min_p", NONE.min_p),
    **sampled("repetition_penalty", NONE.repetition_penalty),
    **sampled("presence_penalty"),
    **sampled("frequency_penalty"),
    "SamplingParams.logit_bias": (*ends(BIAS), request.MAX_LOGIT_BIASES),
    "LogitBias.bias": ends(BIAS),
    "Chat.messages": (ONE, chat.MAX_MESSAGES),
    "Chat.tools_json": (chat.MAX_TOOLS, chat.MAX_TOOLS_CHARACTERS),
    "Chat.template_kwargs_json": (chat.MAX_TEMPLATE_KWARGS_CHARACTERS,),
    "ChatMessage.role": (chat.MAX_ROLE_CHARACTERS,),
    "Grammar.text": (ONE, request.MAX_GRAMMAR_CHARACTERS),
    "GenerateRequest.max_new_tokens": (MAX_NEW_TOKENS.low, request.DEFAULT_MAX_NEW_TOKENS),
    "GenerateRequest.stop_token_ids": (request.MAX_STOP_TOKEN_IDS,),
    "GenerateRequest.gamma": ends(GAMMA),
    "GenerateRequest.stop": (stop_strings.MAX_STOPS, stop_strings.MAX_STOP_CHARACTERS),
    "GenerateRequest.prediction": (request.MAX_PREDICTION_CHARACTERS,),
    "GenerateRequest.logprobs": LOGPROBS,
    "GenerateRequest.prompt_logprobs": LOGPROBS,
    "GenerateRequest.cache_salt": (request.MAX_CACHE_SALT_CHARACTERS,),
    "GenerateRequest.draft_session": (DRAFT_SESSION_BYTES, request.MAX_SEED.bit_length() // 8),
    "AssistPropose.session_id": (2 * DRAFT_SESSION_BYTES,),
    "syntax": (convert.PROTOCOL_VERSION,),
    "Attach.protocol_version": (convert.PROTOCOL_VERSION,),
    "Attach.vocab_size": (MAX_VOCAB_SIZE,),
    "Attached.tokenizer": (MAX_PACKED_BYTES / 2**20,),
    "Attach.num_slots": (ONE, MAX_WORKER_SLOTS),
    "AssistSlots.num_slots": (ONE, MAX_WORKER_SLOTS),
    "AssistRequest.padding": (convert.PAD_BYTES,),
    "AssistResponse.padding": (convert.PAD_BYTES,),
    "Open.prompt_token_ids": (ONE,),
    "Open.max_new_tokens": (MAX_NEW_TOKENS.low,),
    "Open.stop_token_ids": (request.MAX_STOP_TOKEN_IDS,),
    "Open.gamma": ends(GAMMA),
    "GetModelResponse.adapters": (convert.MAX_ADAPTERS,),
    "Propose.branches": (convert.MAX_BRANCHES_OF_MESSAGE, convert.MAX_TOKENS_OF_MESSAGE),
    "Branch.token_ids": (ONE, MAX_TREE_TOKENS),
}
"""Numbers of each comment that states limits, ranges or defaults, in the order of its text."""
NO_LIMITS = (
    *(
        "package version 1",
        "has position 0",
        "fills 0 .. n-1",
        "UTF-8",
        "HTTP/2",
        "of version 1 too",
        "Of version 1:",
    ),
    *("0: greedy", "0: all", "0 (also unset)", "0 switches", "echo also 0"),
    *(
        "0 while unknown",
        "0 in rounds",
        "0: not known",
        "0 for a gateway",
        "0 in a new session",
        "0: none since",
        "logprob is 0",
        "1 if the target left",
    ),
    *("nodes 0, 1, 2, ...", "max_new_tokens may be 0", "0 for the choice", "1 plus the number"),
)
"""Phrases with numbers that are no limits: what a value means, names of formats, positions."""


def comments(text: str) -> dict[str, str]:
    """Return the comments of a .proto by element: those before it, or after it on its line."""
    found: dict[str, str] = {}
    container, block = "", ""
    for line in text.splitlines():
        code, _, comment = line.partition("//")
        block = f"{block} {comment.strip()}".lstrip()
        if not code.strip():
            continue
        if block:
            [name] = filter(None, ELEMENT.search(code).groups())  # type: ignore[union-attr]
            found[f"{container}.{name}" if line.startswith(" ") else name] = block
        if not line.startswith((" ", "}")):
            container = code.split()[1]
        block = ""
    assert block == ""
    return found


def numbers(comment: str) -> tuple[float, ...]:
    """Return the numbers in a comment, except those in phrases that are no limits."""
    for phrase in NO_LIMITS:
        comment = comment.replace(phrase, "")
    return tuple(map(float, NUMBER.findall(comment)))


def faults(text: str) -> dict[str, tuple[float, ...]]:
    """Return the .proto elements whose comments' numbers differ from the code's, with these numbers."""
    found = {name: numbers(comment) for name, comment in comments(text).items()}
    return {name: found.get(name, ()) for name in found | TIED if found.get(name, ()) != TIED.get(name, ())}


def test_every_number_is_that_of_the_code() -> None:
    """Every limit in the .proto's comments is the limit in the code.

    Regression: the .proto had "1 .. 65536 characters" for a grammar, of which servers take 262,144.
    """
    assert faults(PROTO) == {}


@pytest.mark.parametrize(
    ("written", "changed", "name"),
    [
        ("// 1 .. 262144 characters.", "// 1 .. 65536 characters.", "Grammar.text"),
        ("default of\n  // 128.", "default of\n  // 64.", "GenerateRequest.max_new_tokens"),
        ("// May be empty.\n  string content", "// At most 1000 characters.\n  string content", "ChatMessage.content"),
        ("string content = 2;", "string content = 2; // at most 1000 characters", "ChatMessage.content"),
        (
            "// Tokens of the prompt, special",
            "// Below 4096 tokens of the prompt, special",
            "Started.num_prompt_tokens",
        ),
        ("At most 16, none empty", "None empty", "GenerateRequest.stop"),
    ],
)
def test_another_number_is_noticed(written: str, changed: str, name: str) -> None:
    assert PROTO.count(written) == 1
    assert list(faults(PROTO.replace(written, changed))) == [name]


@pytest.mark.parametrize("phrase", NO_LIMITS)
def test_each_phrase_stands_in_the_proto(phrase: str) -> None:
    assert any(phrase in comment for comment in comments(PROTO).values())
