"""Limits in the .proto's comments equal the limits in the code."""

from __future__ import annotations

import re

import pytest

from specdec.inference.config import ROOT
from specdec.inference.request import (
    BIAS,
    DEFAULT_MAX_NEW_TOKENS,
    GAMMA,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_NEW_TOKENS,
    MAX_PREDICTION_CHARACTERS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SamplingParams,
)
from specdec.inference.settings import Range
from specdec.inference.speculation.tree import MAX_TREE_TOKENS
from specdec.inference.text import chat, stop_strings
from specdec.inference.text.tokenizer import MAX_PACKED_BYTES
from specdec.inference.text.vocabulary import MAX_VOCAB_SIZE
from specdec.inference.workers.calls import convert
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES
from specdec.inference.workers.drafting.service import MAX_WORKER_SLOTS

PROTO = (ROOT / "protos" / "specdec" / "v1" / "specdec.proto").read_text()
COMMENTS = " ".join(re.sub(r"\n *//", " ", PROTO).split())
"""Text of the .proto's comments in one line, so that a sentence is found wherever a comment breaks it."""
NONE = SamplingParams()


def ends(limits: Range) -> str:
    return f"{limits.low:g} .. {limits.high:g}"


@pytest.mark.parametrize(
    ("words", "num_places"),
    [
        (f"{ends(RANGES['temperature'])}. 0: greedy", 1),
        (f"Keep the k largest logits. 0: all. Neutral: {NONE.top_k}.", 1),
        (f"this probability, in (0, {RANGES['top_p'].high:g}]. Neutral: {NONE.top_p:g}, all tokens.", 1),
        (f"the largest probability, {ends(RANGES['min_p'])}. 0: all. Neutral: {NONE.min_p:g}.", 1),
        (f"in (0, {RANGES['repetition_penalty'].high:g}]. Neutral: {NONE.repetition_penalty:g}.", 1),
        (f"tokens in the output, {ends(RANGES['presence_penalty'])}. 0 (also unset): no penalty.", 1),
        (f"as often as they occur there, {ends(RANGES['frequency_penalty'])}. 0 (also unset): no penalty.", 1),
        (f"by token id: {ends(BIAS)}, at most {MAX_LOGIT_BIASES} tokens", 1),
        (f"1 .. {chat.MAX_MESSAGES} messages.", 1),
        (f"at most {chat.MAX_TOOLS} functions and {chat.MAX_TOOLS_CHARACTERS} characters.", 1),
        (f"a JSON object of at most {chat.MAX_TEMPLATE_KWARGS_CHARACTERS} characters", 1),
        (f"another role of the chat template; at most {chat.MAX_ROLE_CHARACTERS} characters.", 1),
        (f"1 .. {MAX_GRAMMAR_CHARACTERS} characters.", 1),
        (f"Upper limit of output tokens, at least {MAX_NEW_TOKENS.low};", 1),
        (f"the server's default of {DEFAULT_MAX_NEW_TOKENS}.", 1),
        (f"any of these tokens, at most {MAX_STOP_TOKEN_IDS}, and after", 1),
        (f"after committing any of these, at most {MAX_STOP_TOKEN_IDS}.", 1),
        (f"draft tokens per round, {ends(GAMMA)}.", 1),
        (f"one pass verifies with SCHEDULE_ASYNC, {ends(GAMMA)}.", 1),
        (
            f"At most {stop_strings.MAX_STOPS}, none empty, of at most {stop_strings.MAX_STOP_CHARACTERS} "
            "characters each.",
            1,
        ),
        (f"those of this many best tokens, 0 .. {MAX_LOGPROBS}.", 2),
        (f"the time to the first token. At most {MAX_CACHE_SALT_CHARACTERS} characters.", 1),
        (f"{DRAFT_SESSION_BYTES} random bytes, new in each call.", 1),
        (f"Without sampling.seed, the first {MAX_SEED.bit_length() // 8} of them are the seed", 1),
        (f"{MAX_PREDICTION_CHARACTERS} characters. It changes the speed, never the tokens.", 1),
        (f"for GenerateRequest.adapter; at most {convert.MAX_ADAPTERS}.", 1),
        (f"length a multiple of {convert.PAD_BYTES}, so that the length tells an observer of the", 2),
        (f"package version 1, protocol_version {convert.PROTOCOL_VERSION}.", 1),
        (f"Version of this protocol: {convert.PROTOCOL_VERSION}.", 1),
        (f"Number of the worker's token ids, at most {MAX_VOCAB_SIZE}.", 1),
        (f"the worker can draft for at once, 1 .. {MAX_WORKER_SLOTS}.", 2),
        (f"compressed by zlib, at most {MAX_PACKED_BYTES >> 20} MiB;", 1),
        (f"GenerateRequest.draft_session in {2 * DRAFT_SESSION_BYTES} hexadecimal digits", 1),
        (
            f"at most {convert.MAX_BRANCHES_OF_MESSAGE}, with at most {convert.MAX_TOKENS_OF_MESSAGE} tokens together.",
            1,
        ),
        (f"1 .. {MAX_TREE_TOKENS} token ids,", 1),
    ],
)
def test_a_limit_in_a_comment_is_the_codes(words: str, num_places: int) -> None:
    """Each limit that a comment of the .proto names is the code's, and is named as often as expected.

    Regression: the .proto had "1 .. 65536 characters" for a grammar, of which servers take 262,144.
    """
    assert COMMENTS.count(words) == num_places
