"""Tokenizers with other token ids than a given one, and models for them.

Such a tokenizer has all or some tokens of the given one, in another order. The rows of a model's embedding are put into
that order, so that the model computes the same as before, with other ids.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdec.inference.text.tokenizer import Tokenizer as OurTokenizer

Spelling: TypeAlias = Literal["bytes", "sentencepiece"]
SPACE = "\u2581"


@dataclass(frozen=True)
class Foreign:
    """A tokenizer made from another one; `rows` has, for each of its token ids, the same token's id in that one."""

    tokenizer: PreTrainedTokenizerFast
    rows: list[int]

    @property
    def ours(self) -> OurTokenizer:
        return OurTokenizer(self.tokenizer, frozenset([self.tokenizer.eos_token_id]))

    def save(self, directory: Path, model: PreTrainedModel) -> Path:
        """Reorder the embedding of `model`, in place, for this tokenizer; write both to a directory.

        The directory is returned.
        """
        for layer in {model.get_input_embeddings(), model.get_output_embeddings()}:
            layer.weight = torch.nn.Parameter(layer.weight.data[self.rows])
        model.tie_weights()
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        for config in (model.config, model.generation_config):
            config.eos_token_id, config.bos_token_id = eos, bos
        model.config.vocab_size = len(self.rows)
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        return directory


def foreign(
    first: PreTrainedTokenizerFast, spelling: Spelling = "bytes", *, num_removed: int = 0, seed: int = 0
) -> Foreign:
    """Return a tokenizer with the tokens of `first` under shuffled ids, without its last `num_removed` merges.

    Its tokens are written as bytes, or as SentencePiece writes them.
    """
    fields, ours = json.loads(first.backend_tokenizer.to_str()), OurTokenizer(first, frozenset())
    vocabulary: dict[str, int] = fields["model"]["vocab"]
    merges = [tuple(merge) for merge in fields["model"]["merges"]]
    removed = {left + right for left, right in merges[len(merges) - num_removed :]}
    spelled = {}
    for token, token_id in vocabulary.items():
        is_text = spelling == "sentencepiece" and token_id not in ours.special_ids
        new = _spelled(ours.token_bytes(token_id)) if is_text else token
        if new is not None and token not in removed:
            spelled[token] = new
    order = sorted(spelled)
    random.Random(seed).shuffle(order)
    fields["model"]["vocab"] = {spelled[token]: token_id for token_id, token in enumerate(order)}
    kept = [pair for pair in merges if {*pair, "".join(pair)} <= spelled.keys()]
    fields["model"]["merges"] = [
        [spelled[left], spelled[right]]
        for left, right in kept
        if spelled[left] + spelled[right] == spelled[left + right]
    ]
    for token in fields["added_tokens"]:
        token["id"] = order.index(token["content"])
    for token in ((fields["post_processor"] or {}).get("special_tokens") or {}).values():
        token["ids"] = [order.index(each) for each in token["tokens"]]
    if spelling == "sentencepiece":
        fields |= _SENTENCEPIECE
        fields["model"] |= {"byte_fallback": True, "fuse_unk": True}
    rows = [vocabulary[token] for token in order]
    return Foreign(_fast(Tokenizer.from_str(json.dumps(fields)), first), rows)


def retrained(first: PreTrainedTokenizerFast, texts: list[str], num_ids: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of `num_ids` tokens, trained on these texts, with the special tokens of `first`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = first.backend_tokenizer.pre_tokenizer, first.backend_tokenizer.decoder
    special = [str(each) for each in (first.bos_token, first.eos_token) if each]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer, first)


_SENTENCEPIECE: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ],
    },
    "pre_tokenizer": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}
"""Fields of a tokenizer.json that make a SentencePiece tokenizer of it, as in Llama 2."""


def _spelled(data: bytes) -> str | None:
    """Return a token's bytes as SentencePiece writes them; None for several bytes that are not valid UTF-8."""
    try:
        return data.decode().replace(" ", SPACE)
    except UnicodeDecodeError:
        return f"<0x{data[0]:02X}>" if len(data) == 1 else None


def _fast(tokenizer: Tokenizer, first: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=first.bos_token, eos_token=first.eos_token)


def unigram(first: PreTrainedTokenizerFast, texts: list[str], num_ids: int) -> PreTrainedTokenizerFast:
    """Return a SentencePiece unigram tokenizer that is trained on these texts, with a fallback token for each byte.

    `num_ids` limits the number of trained tokens; the special tokens are those of `first`.
    """
    special = [str(each) for each in (first.bos_token, first.eos_token) if each]
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=num_ids, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    pieces = [(token, score) for token, score in json.loads(trained.to_str())["model"]["vocab"] if token != "<unk>"]
    fallbacks = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary = [("<unk>", 0.0), *((each, 0.0) for each in special), *fallbacks, *pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", *special])
    fields = {**json.loads(tokenizer.to_str()), **_SENTENCEPIECE}
    return _fast(Tokenizer.from_str(json.dumps(fields)), first)
