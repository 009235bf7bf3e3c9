"""Exact simulation of greedy speculative decoding: the accepted share of the draft's proposals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from .generation import Request, generate
from .tokenizer import PAD_ID


@dataclass(frozen=True)
class Acceptance:
    """Counts over many prompts: tokens proposed by the draft, tokens accepted, rounds."""

    proposed: int
    accepted: int
    rounds: int

    @property
    def rate(self) -> float:
        """Accepted tokens per proposed token."""
        return self.accepted / max(1, self.proposed)

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round: the accepted ones and the target's own."""
        return (self.accepted + self.rounds) / max(1, self.rounds)

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.proposed + other.proposed, self.accepted + other.accepted, self.rounds + other.rounds)


def count_rounds(matches: list[bool], gamma: int) -> Acceptance:
    """Count the rounds along one text; `matches[i]`: the draft's greedy choice equals the target's i-th token.

    Up to its first mismatch a proposal equals the target's text, so the draft's choices on that text decide
    everything. Near the end no more tokens are proposed than are still missing.
    """
    total, position = Acceptance(0, 0, 0), 0
    while position < len(matches):
        window = matches[position : position + gamma]
        accepted = window.index(False) if False in window else len(window)
        total += Acceptance(len(window), accepted, 1)
        position += accepted + 1
    return total


def greedy_texts(target: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Let the target continue every prompt greedily; return whole texts, up to and with an end of text."""
    texts: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    for length, indices in by_length.items():
        rows = generate(target, Request(torch.tensor([prompts[i] for i in indices]), 0.0), length + new_tokens)
        for index, row in zip(indices, rows.tolist(), strict=True):
            texts[index] = [token for token in row if token != PAD_ID]
    return texts


def measure(draft: LlamaForCausalLM, prompts: list[list[int]], texts: list[list[int]], gamma: int) -> list[Acceptance]:
    """Return the acceptance along every text of `greedy_texts`."""
    results: list[Acceptance] = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            choices = draft(input_ids=torch.tensor([text[:-1]])).logits[0].argmax(-1).tolist()
        start = len(prompt)
        matches = [choices[index - 1] == text[index] for index in range(start, len(text))]
        results.append(count_rounds(matches, gamma))
    return results
