"""The map between two tokenizers: tokens with equal bytes correspond, whatever their ids, spelling and spaces are."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec.inference.config import BUNDLED_DRAFT
from specdec.inference.errors import IncompatibleDraftError
from specdec.inference.model.token_map import Reading, TokenMap
from specdec.inference.text.plain_tokenizer import PlainTokenizer
from specdec.inference.text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer
from specdec.inference.text.vocabulary import token_map
from specdec.inference.tokens import TokenView
from tests.support.models import tiny_tokenizer
from tests.support.tokenizers import foreign, retrained, unigram

TEXTS = [
    "the wind and the sea, 12 houses\n\tnaïve 日本 €",
    "Once upon a time the sea was in a house and the wind sang",
] * 4
FIRST = PreTrainedTokenizerFast.from_pretrained(BUNDLED_DRAFT)
FIRST.eos_token = "<|eos|>"
BUNDLED = Tokenizer(FIRST, frozenset([1]))
TOKENIZERS = {
    "bundled": BUNDLED,
    "other ids": foreign(FIRST).ours,
    "a third of the merges removed": foreign(FIRST, num_removed=596).ours,
    "sentencepiece": foreign(FIRST, "sentencepiece").ours,
    "sentencepiece, fewer merges": foreign(FIRST, "sentencepiece", num_removed=596).ours,
    "retrained": Tokenizer(retrained(FIRST, TEXTS, 400), frozenset([1])),
    "unigram": Tokenizer(unigram(FIRST, TEXTS, 350), frozenset([1])),
    "tiny": Tokenizer(tiny_tokenizer(), frozenset([1])),
}
ALL = sorted(TOKENIZERS)


@cache
def map_of(own: str, target: str) -> TokenMap:
    ours = TOKENIZERS[own]
    return token_map(ours, ours.num_ids, TOKENIZERS[target], min_share=0.0)


def bytes_of(tokenizer: Tokenizer, token_ids: object) -> bytes:
    assert isinstance(token_ids, list | tuple)
    return b"".join(tokenizer.token_bytes(each) for each in token_ids if each not in tokenizer.special_ids)


@pytest.mark.parametrize("own", ALL)
@pytest.mark.parametrize("target", ALL)
def test_ids_in_common_have_equal_bytes_and_each_one_partner(own: str, target: str) -> None:
    """Tokens that correspond have equal bytes, one partner each, and are both special or both not."""
    ours, theirs = TOKENIZERS[own], TOKENIZERS[target]
    joined = map_of(own, target)
    shared = np.flatnonzero(joined.columns).tolist()
    partners = (joined.columns[shared] - 1).tolist()
    assert len(set(partners)) == len(partners) == joined.num_shared
    for token_id, partner in zip(shared, partners, strict=True):
        assert theirs.token_bytes(token_id) == ours.token_bytes(partner)
        assert (token_id in theirs.special_ids) == (partner in ours.special_ids)
    lacking = {*ours.pieces()} & {*theirs.pieces()} - {(theirs.token_bytes(i), i in theirs.special_ids) for i in shared}
    assert not lacking


@pytest.mark.parametrize("own", ALL)
@pytest.mark.parametrize("target", ALL)
@settings(max_examples=20, deadline=None)
@given(text=st.text(st.sampled_from(" \n\tthewindas12é日€<|>▁"), max_size=40))
def test_the_draft_reads_the_targets_bytes(own: str, target: str, text: str) -> None:
    """A target's tokens, mapped to draft tokens, have the same bytes in sum, even if a token cuts a character."""
    ours, theirs = TOKENIZERS[own], TOKENIZERS[target]
    text = text.replace("▁", " ") if "sentencepiece" in own + target or "unigram" in own + target else text
    token_ids = theirs.encode(text, special=False)
    joined = map_of(own, target)
    assert bytes_of(ours, [*joined.read(token_ids)]) == bytes_of(theirs, token_ids)


@pytest.mark.parametrize("own", ALL)
def test_a_sequence_begins_as_the_draft_expects_and_is_read_once(own: str) -> None:
    ours = TOKENIZERS[own]
    joined = map_of(own, "bundled")
    log = [*BUNDLED.encode("the wind and")]
    reading = Reading(joined)
    whole = [*reading.of(TokenView(log, tail=BUNDLED.encode(" the", special=False)))]
    beginning = [*ours.encode("")]
    assert whole[: len(beginning)] == beginning
    assert whole[len(beginning) : len(beginning) + 1] != beginning or not beginning
    assert bytes_of(ours, whole) == b"the wind and the"
    log += BUNDLED.encode(" the sea", special=False)
    assert bytes_of(ours, [*reading.of(TokenView(log))]) == b"the wind and the sea"
    assert bytes_of(ours, [*reading.of(TokenView([*log[:3]]))]) == bytes_of(BUNDLED, log[:3])


def test_too_small_a_share_is_refused_with_the_way_out() -> None:
    tiny = TOKENIZERS["tiny"]
    with pytest.raises(IncompatibleDraftError, match=r"\d+ of the target's 2048 tokens .*--min_vocabulary_share 0\.5"):
        token_map(tiny, tiny.num_ids, BUNDLED, min_share=0.5)


def test_rows_that_a_model_lacks_are_not_proposed() -> None:
    """Ids that a draft model's output layer lacks are not proposed, even if its tokenizer has them."""
    whole = token_map(TOKENIZERS["other ids"], 2048, BUNDLED, min_share=0.0)
    cut = token_map(TOKENIZERS["other ids"], 2000, BUNDLED, min_share=0.0)
    assert cut.columns.max() == 2000
    assert cut.num_shared == 2000
    assert np.array_equal(cut.columns, np.where(whole.columns > 2000, 0, whole.columns))


def test_a_peers_tokenizer_cannot_fill_the_memory() -> None:
    """A tokenizer that another server sends is refused if it would fill the memory.

    An id of 10^9 would take 8 GB for a table of ids, and a few kilobytes may unpack to any size.
    """
    far = Backend(WordLevel({"a": 10**9}, unk_token="a"))
    target = Tokenizer(PlainTokenizer(far, None), frozenset())
    with pytest.raises(IncompatibleDraftError, match="exceeds the limit"):
        token_map(BUNDLED, 2048, target, min_share=0.0)
    with pytest.raises(IncompatibleDraftError, match="cannot be read"):
        Tokenizer.unpacked(zlib.compress(b" " * 2 * MAX_TOKENIZER_BYTES), frozenset())


def test_a_tokenizer_survives_packing() -> None:
    sent = Tokenizer.unpacked(BUNDLED.packed(), BUNDLED.eos_token_ids)
    assert (sent.fingerprint, sent.eos_token_ids) == (BUNDLED.fingerprint, BUNDLED.eos_token_ids)
    assert sent.pieces() == BUNDLED.pieces()
    assert sent.encode(TEXTS[0]) == BUNDLED.encode(TEXTS[0])
