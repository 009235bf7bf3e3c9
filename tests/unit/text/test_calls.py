"""Tool calls and reasoning in streamed text are read the same however the text is cut into pieces, and none is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.text.calls.formats import FORMATS, HERMES, LLAMA3_JSON, CallFormat
from specdec.inference.text.calls.reader import CallPiece
from specdec.inference.text.reasoning import Reasoning
from specdec.inference.text.tokenizer import Tokenizer
from tests.support.models import tiny_tokenizer

NAMES = frozenset(["f", "get_weather"])
Answer = tuple[str, str, list[tuple[str, str]]]
"""(Reasoning, content, calls) of an answer, where each call is (name of the function, arguments as JSON text)."""


def read(form: CallFormat, pieces: Sequence[str], *, begun: bool = False, one_call: bool = False) -> Answer:
    reader = MessageReader(Reasoning(begun=begun), form.reader(NAMES), one_call=one_call)
    reasoning, content, calls = "", "", dict[int, list[str]]()
    for i, piece in enumerate(pieces):
        reading = reader.push(piece, is_last=i == len(pieces) - 1)
        reasoning, content = reasoning + reading.reasoning, content + reading.content
        for number, call in reading.calls.items():
            if call.name is None:
                calls[number][1] += call.arguments
            else:
                assert number == len(calls), "a call begins once, in order"
                calls[number] = [call.name, call.arguments]
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]


PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "{", "}", "[", "]", '"', "\\", ":",
        ",", ";", " ", "\n", '"name"', '"arguments"', '"parameters"', '"f"', '"g"', "f", "1", "\u00e9", "text",
        '{"name": "f", "arguments": ', '{"name": "f", "parameters": {', '{"a": "}<"}', '{"a": 1}}',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a"}}\n</tool_call>',
    ]
)  # fmt: skip


@settings(deadline=None, max_examples=250)
@given(
    st.lists(PARTS, max_size=14).map("".join),
    st.lists(st.integers(0, 200)),
    st.sampled_from(list(FORMATS)),
    st.booleans(),
)
def test_cutting_a_text_elsewhere_changes_nothing(text: str, places: list[int], name: str, begun: bool) -> None:
    """Tool calls are read the same wherever a stream cuts the text, so streamed and whole answers are equal.

    `places` are the cuts, modulo the length; `name` is a format of calls; with `begun` the text begins in reasoning.
    """
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)] or [""]
    whole = read(FORMATS[name], [text], begun=begun)
    assert read(FORMATS[name], pieces, begun=begun) == whole
    assert read(FORMATS[name], [*text, ""], begun=begun) == whole


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.text(max_size=5), st.text(max_size=12) | st.integers() | st.lists(st.none(), max_size=2), max_size=3
    )
)
def test_written_calls_are_read(arguments: dict[str, object]) -> None:
    """A tool call in text is read back as it was written, even with braces, quotes and markers in its strings."""
    for form in FORMATS.values():
        text = form.written({"function": {"name": "f", "arguments": arguments}})
        ((name, said),) = read(form, list(text))[2]
        assert (name, json.loads(said)) == ("f", arguments)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
CASES: dict[str, tuple[CallFormat, str, Answer]] = {
    "hermes": (HERMES, CALL, ("", "", [("f", '{"a": 1}')])),
    "text before and behind": (HERMES, f"I look.\n\n{CALL}\n done", ("", "I look.done", [("f", '{"a": 1}')])),
    "two": (HERMES, f"{CALL}\n{CALL}\n", ("", "", [("f", '{"a": 1}')] * 2)),
    "behind a thought": (HERMES, f"<think>\nhm\n</think>\n\n{CALL}", ("hm", "", [("f", '{"a": 1}')])),
    "in a thought": (HERMES, f"<think>{CALL}</think>no", (CALL, "no", [])),
    "other order": (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    "cut": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "x', ("", "", [("f", '{"a": "x')])),
    "not closed": (HERMES, f"{CALL.removesuffix('</tool_call>')}{CALL}", ("", "", [("f", '{"a": 1}')] * 2)),
    "never begun": (HERMES, 'say <tool_call> {"na', ("", 'say <tool_call> {"na', [])),
    "unknown name": (HERMES, CALL.replace('"f"', '"g"'), ("", CALL.replace('"f"', '"g"'), [])),
    "spoken of": (HERMES, "a <tool_call> is\n", ("", "a <tool_call> is\n", [])),
    "other content": (HERMES, '<tool_call>{"x": 1}</tool_call>', ("", '<tool_call>{"x": 1}</tool_call>', [])),
    "llama": (LLAMA3_JSON, LLAMA, ("", "", [("f", '{"a": 1}')])),
    "llama with arguments": (LLAMA3_JSON, LLAMA.replace("parameters", "arguments"), ("", "", [("f", '{"a": 1}')])),
    "llama behind its tag": (LLAMA3_JSON, f"<|python_tag|>{LLAMA}", ("", "", [("f", '{"a": 1}')])),
    "llama with a type": (LLAMA3_JSON, '{"type": "function", ' + LLAMA[1:], ("", "", [("f", '{"a": 1}')])),
    "llama twice": (LLAMA3_JSON, f"{LLAMA}; {LLAMA}", ("", "", [("f", '{"a": 1}')] * 2)),
    "llama and text": (LLAMA3_JSON, f"{LLAMA} so", ("", "so", [("f", '{"a": 1}')])),
    "json that is an answer": (LLAMA3_JSON, '{"name": "Bo", "age": 3}', ("", '{"name": "Bo", "age": 3}', [])),
    "json of another kind": (LLAMA3_JSON, '{"city": "x"} f', ("", '{"city": "x"} f', [])),
    "json behind text": (LLAMA3_JSON, f"so: {LLAMA}", ("", f"so: {LLAMA}", [])),
    "code": (LLAMA3_JSON, "<|python_tag|>print(1)", ("", "<|python_tag|>print(1)", [])),
}  # fmt: skip


@pytest.mark.parametrize(("form", "text", "answer"), CASES.values(), ids=CASES)
def test_calls_are_told_from_text_that_looks_alike(form: CallFormat, text: str, answer: Answer) -> None:
    assert read(form, [text]) == answer
    assert read(form, [*text, ""]) == answer


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = HERMES.reader(NAMES)
    begun = '<tool_call>{"name": "f", "arguments": {"a": "long'
    assert reader.push(begun, is_last=False) == ("", {0: CallPiece("f", '{"a": "long')})
    assert reader.push(" text", is_last=False) == ("", {0: CallPiece(None, " text")})


def test_only_the_first_call_where_one_is_wanted() -> None:
    assert read(HERMES, [f"{CALL}\n{CALL}"], one_call=True)[2] == [("f", '{"a": 1}')]


def test_text_that_is_no_call_is_released() -> None:
    reader = LLAMA3_JSON.reader(NAMES)
    assert reader.push('{"name": "' + "x" * 5000, is_last=False)[0]


def test_reasoning_that_the_prompt_has_begun() -> None:
    assert read(HERMES, ["hm", "\n</thi", "nk>\n\nyes"], begun=True) == ("hm", "yes", [])
    assert read(HERMES, ["hm"], begun=True) == ("hm", "", [])
    assert read(HERMES, ["hm </think>"]) == ("", "hm </think>", [])


ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for call in m.tool_calls or [] %}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
HERMES_CALL = f'<tool_call>\n{{"name": "{{{{ call.function.name }}}}", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = '{"name": "{{ call.function.name }}", "parameters": ' + ARGUMENTS + "}<|eom|>"
OTHER_TAG = "<tool_calls>[{{ call.function | tojson }}]</tool_calls>"
CODER_CALL = "<tool_call>\n<function={{ call.function.name }}>\n</tool_call>"
TEMPLATES = {
    "none": (None, "hermes"),
    "hermes": (f"{ROLES}{EACH}{HERMES_CALL}{{% endfor %}}{END}", "hermes"),
    "llama": (f"{ROLES}{EACH}{LLAMA_CALL}{{% endfor %}}{END}", "llama3_json"),
    "hermes' words, without calls": (f"{{# <tool_call> #}}{ROLES}{END}", ""),
    "llama's words, without calls": (f'{{% if tools %}}{{"parameters": 1}}{{% endif %}}{ROLES}{END}', ""),
    "another tag": (f"{ROLES}{EACH}{OTHER_TAG}{{% endfor %}}{END}", ""),
    "qwen coder": (f"{ROLES}{EACH}{CODER_CALL}{{% endfor %}}{END}", ""),
    "no roles": ("{{ messages[0].content }}", ""),
    "refuses": ("{{ raise_exception('only users') }}", ""),
    "after thoughts": (f"{ROLES}{EACH}{HERMES_CALL}{{% endfor %}}{END}".replace("|>{%", "|><think>{%"), "hermes"),
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_shows_the_format_of_calls(template: str | None, name: str) -> None:
    """The format of tool calls is that in which the model's chat template itself writes a call.

    `name` is the format that `template` has.

    Regression: the format was guessed from words in the template, wrongly for 8 of 70 public templates.
    """
    assert Tokenizer(tiny_tokenizer(chat_template=template), frozenset()).call_format() == name


@pytest.mark.parametrize(
    ("form", "beginning"), [(HERMES, '<tool_call>\n{"name": "f", "argum'), (LLAMA3_JSON, '{"name": "f"')]
)
def test_a_call_that_the_limit_cut_is_no_content(form: CallFormat, beginning: str) -> None:
    """The beginning of a tool call that the limit of tokens cut off is not sent as content.

    Regression: it was sent as content.
    """
    for is_cut in (True, False):
        reading = MessageReader(None, form.reader(NAMES), one_call=False).push(beginning, is_last=True, is_cut=is_cut)
        assert (reading.content, reading.calls) == ("" if is_cut else beginning, {})
    reader = MessageReader(None, HERMES.reader(NAMES), one_call=False)
    whole = reader.push(
        f'{HERMES.before}{{"name": "f", "arguments": {{}}}}{HERMES.after}\n<tool_', is_last=True, is_cut=True
    )
    assert (whole.content, len(whole.calls)) == ("", 1)
