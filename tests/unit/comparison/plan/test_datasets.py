"""Prompts from files and by chance: what is read, what is refused with file and line, and how long they are."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison.plan.datasets import Conversation, read_dataset
from comparison.plan.flags import parse_config
from comparison.plan.lengths import Characters, Tokens, draw_lengths, prompts_of_lengths
from inference.config import BUNDLED_TARGET, ROOT
from inference.errors import ConfigError

ENDPOINT = ["--endpoint", "a=grpc://localhost:1"]


def test_sharegpt_gives_the_questions_of_each_conversation(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "answer"}, {"from": "human", "value": "two"}]
    file = tmp_path / "share.json"
    file.write_text(json.dumps([{"conversations": said}, {"conversations": [{"from": "gpt", "value": "alone"}]}]))
    assert read_dataset(file) == (Conversation(("one", "two")),)


def test_lines_are_chats_or_prompts(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}
    file.write_text(f'{json.dumps(chat)}\n\n{{"prompt": "a text"}}\n')
    assert read_dataset(file) == (Conversation(("hello",), "be brief"), "a text")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt"', "a.jsonl, line 2: no JSON"),
        ("a.jsonl", "[1]", "a.jsonl, line 1: a JSON object is expected"),
        ("a.jsonl", '{"prompt": ""}', "a.jsonl, line 1: a text that is not empty is expected"),
        ("a.jsonl", "{}", 'a.jsonl, line 1: a list "messages" is expected'),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', "line 1, messages[0]: a text"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', 'line 1: no message is of "user"'),
        ("a.jsonl", "\n", "a.jsonl has no prompt"),
        ("a.jsonl", '{"prompt": "a\\ud800"}', "a.jsonl, line 1: character 1 is no UTF-8"),
        ("a.json", "{}", "a.json: ShareGPT's list of conversations is expected"),
        ("a.json", '[\n{"x": }]', "a.json: no JSON (Expecting value: line 2"),
        ("a.json", '[{"conversations": 1}]', 'a.json, conversation 1: a list "conversations" is expected'),
        ("a.json", "[]", "a.json has no prompt"),
        ("a.txt", "\n", "a.txt has no prompt"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_dataset(tmp_path / name)
    assert message in str(error.value)


@settings(max_examples=50)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40), max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seed=st.integers(0, 2**64 - 1),
)
def test_prompts_have_the_lengths_that_were_drawn(texts: list[str], lengths: list[int], seed: int) -> None:
    prompts = prompts_of_lengths(texts, lengths, seed, Characters())
    assert [len(Characters().cut(prompt)) for prompt in prompts] == lengths
    assert prompts == prompts_of_lengths(texts, lengths, seed, Characters())


def test_a_tokenizer_counts_its_own_tokens() -> None:
    """A text that was cut may be read as other tokens; it is never longer than asked, and seldom shorter."""
    pieces, lengths = Tokens(BUNDLED_TARGET), list(range(1, 60))
    for texts in ((), ("It was a dark and stormy night, 1 2 3 4", "caf\u00e9 \u4f60\u597d")):
        found = [len(pieces.cut(prompt)) for prompt in prompts_of_lengths(texts, lengths, 7, pieces)]
        assert all(count <= length for count, length in zip(found, lengths, strict=True))
        assert statistics.fmean(length - count for count, length in zip(found, lengths, strict=True)) < 1.0


def test_lengths_are_distributed_as_asked_and_repeat() -> None:
    lengths = draw_lengths(2000, 5, 200.0, 20.0)
    assert statistics.fmean(lengths) == pytest.approx(200.0, rel=0.02)
    assert statistics.stdev(lengths) == pytest.approx(20.0, rel=0.1)
    assert lengths == draw_lengths(2000, 5, 200.0, 20.0) != draw_lengths(2000, 6, 200.0, 20.0)


def test_flags_make_prompts_of_a_length_without_a_model() -> None:
    flags = [*ENDPOINT, "--dataset", "random", "--input_tokens", "50", "--num_prompts", "4"]
    [found] = parse_config(flags).workload.prompt_sets
    assert found.kind == "random"
    assert [len(prompt) for prompt in found.prompts if isinstance(prompt, str)] == [200] * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "random"], "dataset random needs --input_tokens"),
        (["--input_tokens", "0"], "mean 0 is outside 1..1000000"),
        (["--input_tokens", "10,11"], "stddev 11 is outside 0..10"),
        (["--dataset", "nowhere.json"], "dataset nowhere.json cannot be read"),
        (["--rtt_ms", "0,5"], "rtt_ms 5: the network to an endpoint is what it is"),
        (["--endpoint", "a=grpc://localhost:2"], "name a is given 2 times"),
        (["--endpoint", "target=grpc://localhost:2", "--topologies", "target"], "name target is given 2 times"),
    ],
)
def test_what_endpoints_cannot_be_asked_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config([*ENDPOINT, *flags])
    assert message in str(error.value)


def test_conversations_have_their_own_lengths(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    with pytest.raises(ConfigError, match="has conversations, whose lengths are their own"):
        parse_config([*ENDPOINT, "--dataset", str(file), "--input_tokens", "9"])


def test_prompts_of_the_studies_are_there() -> None:
    files = sorted((ROOT / "prompts").glob("study_*.txt"))
    assert [file.stem for file in files] == ["study_code", "study_numbers", "study_open", "study_repetition"]
    assert all(len(read_dataset(file)) >= 8 for file in files)


def test_what_others_said_is_not_looked_at(tmp_path: Path) -> None:
    """Public copies of ShareGPT have empty answers, and chats have null where tools were called: a whole file was
    refused for words that are never sent."""
    (tmp_path / "a.json").write_text(
        json.dumps(
            [
                {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": ""}]},
                {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "what?"}]},
            ]
        )
    )
    assert read_dataset(tmp_path / "a.json") == (Conversation(("one",)),)
    chat = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": []}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat))
    assert read_dataset(tmp_path / "a.jsonl") == (Conversation(("one",)),)
