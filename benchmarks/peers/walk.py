"""Pairs of random Llama models of given sizes that agree as real pairs do, so that drafts are worth measuring.

A target of random weights has no draft that agrees with it. Here the target's output layer is set so that each token
is followed by the next one of a fixed walk over the vocabulary. The draft knows the same walk, but after a share of the
tokens it is unsure: there a wrong token has nearly the same logit, and half of the time a higher one. Everything else
is random, and a pass takes the time of its size.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.shapes import SHAPES, random_model
from specdec.inference.config import BUNDLED_TARGET

DRAFTS = {"110M": "15M", "1B": "110M"}
"""Shape (sizes) of the draft, by the shape of the target; both have one vocabulary."""
UNSURE = 0.4
"""Share of the tokens after which the draft is unsure of the next one."""
EMBEDDING_STD = 3.0
"""Standard deviation of the embeddings, so large that the random layers do not hide which token was read."""
TOP_LOGIT = 14.0
CLOSE = 0.9
"""Lower logit over higher logit of the two likely next tokens where the draft is unsure."""


def walking_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the directories of a target of the shape `name`, and of its draft; make those that are missing.

    Both have random weights and the bundled tokenizer.
    """
    target, draft = folder / name / "target", folder / name / "draft"
    if not target.exists():
        _save(_walker(name, unsure=0.0), target)
    if not draft.exists():
        _save(_walker(DRAFTS[name], unsure=UNSURE), draft)
    return target, draft


def steps(num_tokens: int, unsure: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each token, the next one of a walk over all tokens, a wrong one, and their logits.

    The results are random, but the same at each call.

    Returns:
        The right next token of each token, [num_tokens]; a wrong one, [num_tokens]; and the logits of both as shares of
        the highest one, [2, num_tokens]. For a share `unsure` of the tokens, the two logits are close.
    """
    generator = torch.Generator().manual_seed(1)
    order, others = (torch.randperm(num_tokens, generator=generator) for _ in range(2))
    right = torch.empty_like(order)
    right[order] = order.roll(-1)
    doubt = torch.rand(num_tokens, generator=generator)
    parts = torch.ones(2, num_tokens)
    parts[1] = 0.0
    parts[:, doubt < unsure] = torch.tensor([[1.0], [CLOSE]])
    parts[:, doubt < unsure / 2] = torch.tensor([[CLOSE], [1.0]])
    return right, others, parts


def _walker(name: str, *, unsure: float) -> PreTrainedModel:
    shape = SHAPES[name]
    model = random_model(shape, tied=False)
    num_walked = SHAPES["target"].vocab_size  # those that the bundled tokenizer has
    right, wrong, parts = steps(num_walked, unsure)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(std=EMBEDDING_STD)
        size = TOP_LOGIT / shape.hidden_size**0.5
        head.normal_(std=size / shape.hidden_size**0.5)
        directions = size * embedding[:num_walked] / embedding[:num_walked].norm(dim=1, keepdim=True)
        head[:num_walked] = 0.0
        head.index_add_(0, right, parts[0, :, None] * directions)
        head.index_add_(0, wrong, parts[1, :, None] * directions)
    return model


def _save(model: PreTrainedModel, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    model.save_pretrained(part)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(BUNDLED_TARGET / file, part)
    part.rename(path)
