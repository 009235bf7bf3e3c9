"""Grammars and a tokenizer's special tokens: literals are spelled as text, markers as the token or as its letters."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from specdec.inference.config import BUNDLED_TARGET
from specdec.inference.request import Grammar, GrammarKind
from specdec.inference.text.calls.formats import MARKERS
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.grammar_source import written_out
from specdec.inference.text.grammar_words import GrammarWords
from specdec.inference.text.reasoning import BEGIN, END
from specdec.inference.text.tokenizer import Tokenizer
from tests.support.grammars import literal_of, spelled, taken
from tests.support.marked import marked
from tests.support.models import EOS_TOKEN_ID, tiny_tokenizer


def with_markers(*, special: bool) -> Tokenizer:
    fast = tiny_tokenizer()
    added = [AddedToken(each, special=special, normalized=False) for each in (*MARKERS, BEGIN, END, "<table>")]
    fast.add_tokens(added, special_tokens=special)
    return Tokenizer(fast, frozenset([EOS_TOKEN_ID]))


TOKENIZERS = {
    "bundled": Tokenizer.load(BUNDLED_TARGET),
    "markers are special": with_markers(special=True),
    "markers are added": with_markers(special=False),
}
COMPILERS = {name: GrammarCompiler(each, each.num_ids) for name, each in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["const", "property", "regex", "choice", "lark"])
def test_a_literal_is_text_though_a_special_token_has_its_name(name: str, kind: str) -> None:
    """A grammar whose only text has names of special tokens, such as <|eos|>, gives exactly that text.

    Regression: llguidance used the special token for the text, so a schema's answer ended in the middle with finish
    reason stop, or with "the grammar refuses token 2 of the output, which it had allowed".
    """
    tokenizer, compiler = TOKENIZERS[name], COMPILERS[name]
    names = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    assert len(names) > 1
    for each in (*names, f"a{names[0]}{names[-1]}b"):
        grammar, text = literal_of(kind, each)
        assert spelled(compiler, tokenizer, grammar) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_that_a_normalizer_would_change_is_spelled(name: str) -> None:
    grammar, text = literal_of("const", "e\u0301 \u2581 \U0001f600\n")
    assert spelled(COMPILERS[name], TOKENIZERS[name], grammar) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("grammar", "text"), marked().values(), ids=marked())
def test_a_marker_comes_as_a_token_or_as_letters(name: str, grammar: Grammar, text: str) -> None:
    """A marker of a format, such as <tool_call>, is allowed both as the model's token for it and as its letters.

    Regression: with Qwen's tokenizer a required call allowed only the token <tool_call> and then refused it, and
    reasoning before JSON could not end with </think>.
    """
    tokenizer, compiler = TOKENIZERS[name], COMPILERS[name]
    own = tokenizer.encode(text, special=False)
    letters = GrammarWords(tokenizer, tokenizer.num_ids, tokenizer.eos_token_ids)(text.encode())
    assert any(each in own for each in tokenizer.markers.values()) == (name != "bundled" and "<" in text)
    for sent in (grammar, written_out(grammar)):
        for token_ids in (own, letters):
            assert taken(compiler, sent, token_ids), tokenizer.text_of(token_ids)


def test_other_added_tokens_are_text() -> None:
    """An added token that is not special is allowed where its text is, and spells a literal with that text."""
    tokenizer = TOKENIZERS["markers are added"]
    (table,) = tokenizer.encode("<table>", special=False)
    matcher = COMPILERS["markers are added"].compile(Grammar(GrammarKind.REGEX, "[<>a-z]*"))
    assert matcher.num_allowed((), [table]) == 1
    assert COMPILERS["markers are added"].compile(Grammar(GrammarKind.CHOICE, '["<table>"]')).forced((), 1) == [table]
    assert (
        COMPILERS["markers are special"].compile(Grammar(GrammarKind.REGEX, "[<>a-z]*")).num_allowed((), [table]) == 0
    )
