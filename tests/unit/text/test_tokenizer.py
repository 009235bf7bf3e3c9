"""Streamed text equals the text decoded at once, tokens have the right bytes, and chats become the right prompts."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.inference.text.tokenizer import MAX_SILENT_TOKENS, MAX_TEMPLATE_CHARACTERS, Tokenizer, plain_chat
from tests.support.models import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    NUM_TOKENIZER_IDS,
    marked_tokenizer,
    save_tiny_model,
    tiny_tokenizer,
)

relaxed = settings(deadline=None, max_examples=150)
texts = st.text(alphabet=" abthe\n\u00e9\u6771\u4eac\U0001f642\u0301\u2581", max_size=25)


def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(chat_template=CHAT_TEMPLATE), frozenset())


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama's: a first space is no part of the text; unknown characters are byte tokens."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [("\u2581", -2.0), ("\u2581the", -1.0), ("a", -1.5), ("\u2581a", -1.0), ("\u00e9", -2.0), ("t", -2.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), frozenset())


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def streamed(tokenizer: Tokenizer, token_ids: list[int] | tuple[int, ...]) -> tuple[list[str], str]:
    stream = tokenizer.stream()
    return [stream.push(token_id) for token_id in token_ids], stream.rest()


@relaxed
@given(st.lists(st.integers(0, NUM_TOKENIZER_IDS - 1), max_size=25))
def test_deltas_of_any_bytes_add_up_to_the_whole(token_ids: list[int]) -> None:
    """The parts of a stream add up to the text decoded at once, whatever the tokens' bytes are.

    The bytes of random tokens are not UTF-8, and special tokens have no text.
    """
    pieces, rest = streamed(BYTE_LEVEL, token_ids)
    assert "".join(pieces) + rest == BYTE_LEVEL.decode(token_ids)


@pytest.mark.parametrize("token_ids", [[1], ["\x80"], ["\xf0", "\x9f"], ["\xe2", "\x82", "\xf0"]], ids=str)
def test_long_runs_without_text_cost_no_more(token_ids: list[Any]) -> None:
    """Long runs of tokens without text take no more time per token than others.

    Regression: the library decoded the whole run again for each token; after 40,000 lone bytes a token took 10 ms of
    the event loop.
    """
    vocabulary = BYTE_LEVEL._tokenizer.get_vocab()
    bytes_of = {BYTE_LEVEL.token_bytes(token_id): token_id for token_id in sorted(vocabulary.values(), reverse=True)}
    run = [each if isinstance(each, int) else bytes_of[each.encode("latin-1")] for each in token_ids]
    for behind in ((), BYTE_LEVEL.encode("\U0001f642 the")):
        tokens = [*BYTE_LEVEL.encode("a"), *run * 30, *behind]
        pieces, rest = streamed(BYTE_LEVEL, tokens)
        assert "".join(pieces) + rest == BYTE_LEVEL.decode(tokens)
        assert len(rest) < MAX_SILENT_TOKENS
    a, the, unknown = (*SENTENCEPIECE.encode("a\u2581the"), 0)
    assert "".join(streamed(SENTENCEPIECE, [a, *[unknown] * 30, the])[0]) == "a the"
    began = time.thread_time()
    streamed(BYTE_LEVEL, run * 10_000)
    assert time.thread_time() - began < 20.0  # it was a minute, and grew by the square


@relaxed
@given(texts)
def test_deltas_of_a_text_add_up_to_the_text(text: str) -> None:
    """The parts of a stream add up to the whole text, and no part ends within a character."""
    pieces, rest = streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(pieces) + rest == text
    assert not any("\ufffd" in piece for piece in pieces)
    token_ids = SENTENCEPIECE.encode(text.replace(" ", "\u2581"))
    pieces, rest = streamed(SENTENCEPIECE, token_ids)
    assert "".join(pieces) + rest == SENTENCEPIECE.decode(token_ids)


@relaxed
@given(st.lists(st.integers(0, 262), max_size=20))
def test_broken_bytes_never_fail_a_stream(token_ids: list[int]) -> None:
    """No bytes make a stream fail, though the library `tokenizers` raises if later bytes change earlier text."""
    streamed(SENTENCEPIECE, token_ids)


@relaxed
@given(texts)
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, token_ids)).decode() == text


def test_token_bytes_of_other_tokenizers() -> None:
    assert SENTENCEPIECE.token_bytes(1 + 0xE2) == b"\xe2"
    assert SENTENCEPIECE.token_bytes(258) == b" the"
    assert BYTE_LEVEL.token_bytes(1) == b"<eos>"
    assert BYTE_LEVEL.token_bytes(99_999) == b""


def test_a_chat_goes_through_the_models_template() -> None:
    token_ids = BYTE_LEVEL.encode_chat(Chat.of(("system", ""), ("user", "on")))
    assert BYTE_LEVEL.decode(token_ids) == "system: \nuser: on\nassistant:"


def test_a_model_without_a_template_gets_the_plain_one() -> None:
    token_ids = Tokenizer(tiny_tokenizer(), frozenset()).encode_chat(Chat.of(("user", "on")))
    assert BYTE_LEVEL.decode(token_ids) == plain_chat(Chat.of(("user", "on"))) == "user: on\n\nassistant:"


@pytest.mark.parametrize("own", [None, "[{{ messages[0]['content'] }}]"])
@pytest.mark.parametrize("targets", [None, CHAT_TEMPLATE])
def test_a_draft_writes_conversations_as_its_target_does(tmp_path: Path, own: str | None, targets: str | None) -> None:
    """A draft worker turns chats into prompts with its target's chat template.

    `own` is the chat template of the draft's model, and `targets` that of the target; None stands for none.

    Regression: a draft worker used its own model's chat template, so the same chat had two different prompts.
    """
    save_tiny_model(tmp_path, "llama", chat_template=own)
    expected = Tokenizer(tiny_tokenizer(chat_template=targets), frozenset())
    tokenizer = Tokenizer.load(tmp_path).with_template(targets, tmp_path)
    assert tokenizer.chat_template == targets
    assert tokenizer.encode_chat(Chat.of(("user", "on"))) == expected.encode_chat(Chat.of(("user", "on")))


FUNCTION = '{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}'
TOOLS = f'[{{"type": "function", "function": {FUNCTION}}}]'


def test_a_conversation_with_tools_has_its_own_template(tmp_path: Path) -> None:
    """Chats with tools use the chat template called "tool_use", others "default"; a draft worker gets both.

    Regression: a draft worker was sent "default" alone, and so had another prompt than its target.
    """
    named = {
        "default": "\n  {{ messages[0]['content'] }}\n",
        "tool_use": "{% set n = 1 %}\n {{ n }}{{ tools | length }}\n\n",
    }
    fast = tiny_tokenizer()
    fast.chat_template = named
    chats = Chat.of(("user", "on")), Chat((ChatMessage("user", "on"),), TOOLS)
    asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    expected = [fast.apply_chat_template(each.conversation(), tools=each.tools(), **asked) for each in chats]
    assert expected == ["\n  on", " 11\n"]
    fast.save_pretrained(tmp_path)
    target = Tokenizer.load(tmp_path)
    save_tiny_model(tmp_path / "draft", "llama")
    draft = Tokenizer.load(tmp_path / "draft").with_template(target.chat_template, tmp_path / "draft")
    for tokenizer in (target, draft):
        assert [tokenizer.decode(tokenizer.encode_chat(chat)) for chat in chats] == expected


SPOKEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
END_TEMPLATE = SPOKEN + "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("", "<user>on|<assistant>of|<assistant>"),
        ('{"add_generation_prompt": true}', "<user>on|<assistant>of|<assistant>"),
        ('{"add_generation_prompt": false}', "<user>on|<assistant>of|"),
        ('{"add_generation_prompt": false, "continue_final_message": true}', "<user>on|<assistant>of"),
    ],
)
def test_a_request_says_how_the_prompt_ends(ends: str, expected: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(chat_template=END_TEMPLATE), frozenset())
    chat = Chat((ChatMessage("user", "on"), ChatMessage("assistant", "of")), template_kwargs_json=ends)
    assert tokenizer.encode_chat(chat) == tokenizer.encode(expected, special=False)


def test_an_end_without_a_template_and_other_arguments_of_the_library_are_refused() -> None:
    plain, templated = (Tokenizer(tiny_tokenizer(chat_template=each), frozenset()) for each in (None, END_TEMPLATE))
    ends = Chat((ChatMessage("user", "on"),), template_kwargs_json='{"add_generation_prompt": false}')
    with pytest.raises(InvalidRequestError, match="add_generation_prompt: the model has no chat template"):
        plain.encode_chat(ends)
    for name in ("tokenize", "chat_template", "padding"):
        with pytest.raises(InvalidRequestError, match=f"{name} says how the template is used"):
            templated.encode_chat(Chat(ends.messages, template_kwargs_json=json.dumps({name: True})))


@pytest.mark.parametrize(
    ("file", "ids", "found"), [("generation_config.json", [2, 3], {2, 3}), ("config.json", 3, {3}), (None, None, set())]
)
def test_all_end_tokens_count(tmp_path: Path, file: str | None, ids: Any, found: set[int]) -> None:
    """A text ends at the tokenizer's end token and at those of the model's configuration.

    `file` gets eos_token_id `ids`; `found` are the end tokens that it adds.

    Regression: an end token that only the tokenizer named did not count, and the model wrote on to the limit.
    """
    tiny_tokenizer().save_pretrained(tmp_path)
    if file is not None:
        (tmp_path / file).write_text(json.dumps({"eos_token_id": ids}))
    assert Tokenizer.load(tmp_path).eos_token_ids == {EOS_TOKEN_ID, *found}


CALLS = '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": [1]}"}}]'
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}|{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% for call in m.tool_calls or [] %} {{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %} {{ m.content }}|{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ASKED = (
    ChatMessage("user", "on"),
    ChatMessage("assistant", tool_calls_json=CALLS),
    ChatMessage("tool", "3", tool_call_id="1"),
)


def test_tools_calls_and_variables_reach_the_template() -> None:
    """Tools, tool calls and template variables of a request reach the chat template.

    The arguments of a call arrive as JSON text, and reach the template as objects.
    """
    tokenizer = Tokenizer(tiny_tokenizer(chat_template=TOOL_TEMPLATE), frozenset())
    chat = Chat(ASKED, TOOLS, '{"enable_thinking": false}')
    expected = TOOLS[1:-1] + '|user on|assistant f({"a": [1]}) |tool 3|<think></think>'
    assert tokenizer.decode(tokenizer.encode_chat(chat)) == expected
    plain = Tokenizer(tiny_tokenizer(), frozenset())
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    assert (
        plain.decode(plain.encode_chat(chat))
        == f"tools: {TOOLS}\n\nuser: on\n\nassistant: {call}\n\ntool: 3\n\nassistant:"
    )


def test_arguments_that_were_cut_stay_what_they_are() -> None:
    """A tool call whose arguments were cut off is accepted in a chat, and its arguments stay the text that they are.

    Regression: an agent that sent back a call which the model had not finished got status 400.
    """
    cut = ChatMessage("assistant", tool_calls_json=CALLS.replace("[1]}", "[1"))
    (message,) = Chat((cut,)).conversation()
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": [1'


NO_CHATS = {
    "tools": (Chat(ASKED, "{"), "tools: not valid JSON", "tools"),
    "tools of texts": (Chat(ASKED, '["f"]'), "tools: a JSON array of objects", "tools"),
    "too many tools": (Chat(ASKED, json.dumps([{}] * 129)), "tools has 129 elements, the limit is 128", "tools"),
    "deep tools": (Chat(ASKED, "[" * 50_000), "tools: not valid JSON", "tools"),
    "variables": (Chat(ASKED, "", "[]"), "chat_template_kwargs: a JSON object", "chat_template_kwargs"),
    "another template": (
        Chat(ASKED, "", '{"chat_template": "x"}'),
        "chat_template_kwargs.chat_template says how",
        "chat_template_kwargs",
    ),
    "a call": (
        Chat((ChatMessage("assistant", tool_calls_json='[{"id": "1"}]'),)),
        "messages[0].tool_calls[0].function: an object",
        "messages",
    ),
    "half a character": (Chat(ASKED, '[{"x": "\\ud800"}]'), "not valid UTF-8", "messages"),
}


@pytest.mark.parametrize(("chat", "part", "field"), NO_CHATS.values(), ids=NO_CHATS)
def test_faults_of_conversations_are_named(chat: Chat, part: str, field: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(chat_template=TOOL_TEMPLATE), frozenset())
    with pytest.raises(InvalidRequestError, match=re.escape(part)) as caught:
        tokenizer.encode_chat(chat)
    assert caught.value.field == field


def test_marks_of_calls_are_text_where_calls_are_read() -> None:
    """The special token <|python_tag|> appears in the text only if tool calls are read; other text is the same."""
    tokenizer = Tokenizer(marked_tokenizer(), frozenset())
    (mark,) = tokenizer.shown_markers(calls=True)
    token_ids = [*tokenizer.encode("a\u00e9"), mark, *tokenizer.encode(" the\u00e9"), mark]
    for shown, text in (
        (tokenizer.shown_markers(calls=True), "a\u00e9<|python_tag|> the\u00e9<|python_tag|>"),
        ({}, "a\u00e9 the\u00e9"),
    ):
        stream = tokenizer.stream(shown)
        assert "".join(map(stream.push, token_ids)) + stream.rest() == text
    assert BYTE_LEVEL.shown_markers(calls=True) == {}


def test_a_character_that_a_mark_cuts_comes_once() -> None:
    """A character of which a marker cuts off the rest is written as one replacement character, before the marker."""
    tokenizer = Tokenizer(marked_tokenizer(), frozenset())
    (mark,) = tokenizer.shown_markers(calls=True)
    first_half = tokenizer.encode("\u00e9")[:1]
    stream = tokenizer.stream(tokenizer.shown_markers(calls=True))
    pieces = [stream.push(token_id) for token_id in [*tokenizer.encode("ab"), mark, *first_half, mark, *first_half]]
    assert "".join(pieces) + stream.rest() == "ab<|python_tag|>\ufffd<|python_tag|>\ufffd"


def test_a_template_that_refuses_messages() -> None:
    """An empty system message that a chat template refuses is left out; any other refusal is an error of the client."""
    refusal = "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m['content'] }}{% endfor %}"
    strict = Tokenizer(tiny_tokenizer(chat_template=template), frozenset())
    assert strict.decode(strict.encode_chat(Chat.of(("system", ""), ("user", "on")))) == "on"
    with pytest.raises(InvalidRequestError, match=r"messages.*no system"):
        strict.encode_chat(Chat.of(("system", "be kind"), ("user", "on")))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.load(tmp_path)


def test_the_template_of_another_server_has_a_limit(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match=f"exceeds {MAX_TEMPLATE_CHARACTERS}"):
        tokenizer.with_template("x" * (MAX_TEMPLATE_CHARACTERS + 1), tmp_path)
    assert not tokenizer.is_slow_to_chat
    assert tokenizer.with_template(CHAT_TEMPLATE, tmp_path).is_slow_to_chat


def test_a_templates_message_is_bounded() -> None:
    template = "{{ raise_exception('no\\nlines ' + 'x' * 5000) }}"
    strict = Tokenizer(tiny_tokenizer(chat_template=template), frozenset())
    with pytest.raises(InvalidRequestError, match="no lines x") as caught:
        strict.encode_chat(Chat.of(("user", "on")))
    assert len(str(caught.value)) < 300
