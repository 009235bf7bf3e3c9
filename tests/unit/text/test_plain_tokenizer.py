"""The tokenizer that works without Transformers gives the same results for models it supports, and refuses others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specdec.inference.config import BUNDLED_TARGET, ROOT
from specdec.inference.text.plain_tokenizer import MANY_IDS, PlainTokenizer, load_plain
from specdec.inference.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def pair() -> tuple[PlainTokenizer, Any]:
    plain = load_plain(BUNDLED_TARGET)
    assert plain is not None
    return plain, PreTrainedTokenizerFast.from_pretrained(BUNDLED_TARGET)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(["<|bos|> a<|eos|>b", " \n\t", "\u00e9\U0001f600"]))
def test_texts_become_the_same_tokens_and_back(pair: tuple[PlainTokenizer, Any], text: str) -> None:
    plain, fast = pair
    for special in (True, False):
        token_ids = plain(text, add_special_tokens=special)["input_ids"]
        assert token_ids == fast(text, add_special_tokens=special)["input_ids"]
        ways = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
        assert plain.decode(token_ids, **ways) == fast.decode(token_ids, **ways)


def test_many_ids_become_the_same_text(pair: tuple[PlainTokenizer, Any]) -> None:
    ids = [token_id % len(pair[0].get_vocab()) for token_id in range(0, 7 * MANY_IDS, 7)]
    assert len(ids) == MANY_IDS
    for skip in (True, False):
        texts = [each.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for each in pair]
        assert texts[0] == texts[1]


def test_vocabularies_are_the_same(pair: tuple[PlainTokenizer, Any]) -> None:
    plain, fast = pair
    assert plain.get_vocab() == fast.get_vocab()
    assert plain.eos_token_id == fast.eos_token_id
    assert [plain.convert_ids_to_tokens(i) for i in (0, 5, 2047)] == fast.convert_ids_to_tokens([0, 5, 2047])
    assert plain.convert_ids_to_tokens(10**6) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"chat_template": "{{ messages }}"},
        {"pad_token": "<new>"},
        {"extra_special_tokens": ["<tool>"]},
        {"added_tokens_decoder": {"2048": {"content": "<later>", "special": True}}},
    ],
)
def test_missing_tokenizer_parts_use_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = shutil.copytree(BUNDLED_TARGET, tmp_path / "model")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert load_plain(directory) is None
    assert isinstance(load_plain(BUNDLED_TARGET), PlainTokenizer)
    Tokenizer.load(directory)


@pytest.mark.long
def test_a_packed_model_is_served_without_torch() -> None:
    """A model whose packed weights are in the cache is served without importing torch.

    Regression: importing torch took four of the five seconds until a server was ready.
    """
    script = (
        "import sys; from specdec.inference.text.tokenizer import Tokenizer; "
        "from specdec.inference.backends.registry import load_backend; "
        "from specdec.inference.config import BUNDLED_DRAFT, ModelConfig; import specdec.inference.serving.target; "
        "Tokenizer.load(BUNDLED_DRAFT); load_backend(ModelConfig(BUNDLED_DRAFT, backend='onnx', num_slots=1)); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[1].stdout.strip() == "[]"  # the first may have packed
