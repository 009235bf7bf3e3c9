"""Speculative decoding with shared noise on one page: one process, a draft model, a target model.

    python examples/minimal.py --prompt "1, 2, 3, 4," --temperature 0.8 --seed 7

The draft proposes tokens, the target verifies all of them in one pass, and a token is accepted if it equals the one
that the target chooses itself. Both models choose with the same noise, so the text is exactly the target's: it depends
on neither the draft nor on how many tokens it proposes. A server of this project gives the same tokens; what it adds is
batches, a network between draft and target, and everything else that a service needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODELS = Path(__file__).resolve().parent.parent / "models"


Vector = npt.NDArray[np.float64]


def mix(x: Any) -> Any:
    """Apply SplitMix64's finalizer to uint64 numbers or arrays; products wrap modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Vector:
    """Return the noise G(seed, position, v) of every token v: float64 [vocab_size].

    It is a hash, not a generator with a state, so that draft and target compute the same noise without any message.
    docs/noise.md defines it to the bit.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = mix(mix(np.uint64(seed) + golden) + np.uint64(position + 1) * golden)
        bits = mix(key + (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * golden) >> np.uint64(12)
    uniform: Vector = (bits + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


class Model:
    """Causal language model with a KV cache that can be cut back to any length."""

    def __init__(self, path: Path, temperature: float, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._cache = DynamicCache(config=self._model.config)
        self._temperature = temperature
        self._seed = seed

    @torch.inference_mode()
    def choose(self, token_ids: list[int], num_choices: int) -> list[int]:
        """Choose the token after each of the last `num_choices` prefixes of `token_ids`, in one pass.

        The pass reads what the cache does not hold. Rejected draft tokens are cut off first.
        """
        start = min(self._cache.get_seq_length(), len(token_ids) - num_choices)
        if (num_surplus := self._cache.get_seq_length() - start) > 0:
            self._cache.crop(-num_surplus)
        output = self._model(torch.tensor([token_ids[start:]]), past_key_values=self._cache)
        rows = output.logits[0, -num_choices:].double().numpy()  # [num_choices, vocab_size]
        first = len(token_ids) - num_choices + 1  # position of the token that the first row chooses
        return [self._choose(row, first + i) for i, row in enumerate(rows)]

    def _choose(self, logits: Vector, position: int) -> int:
        """Choose by Gumbel-max: the argmax of logits plus noise samples their softmax; without noise, be greedy."""
        if self._temperature > 0:
            logits = logits / self._temperature + gumbel_noise(self._seed, position, len(logits))
        return int(logits.argmax())


def generate(draft: Model, target: Model, prompt: list[int], *, num_tokens: int, gamma: int, end: int) -> list[int]:
    """Return the target's continuation of a prompt: `num_tokens` tokens, or fewer if the token `end` comes."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        # 1. Draft: gamma tokens, one pass of the small model each.
        proposal: list[int] = []
        for _ in range(gamma):
            proposal += draft.choose(token_ids + proposal, 1)
        # 2. Verify: one pass of the large model chooses its own token after every prefix of the proposal.
        chosen = target.choose(token_ids + proposal, gamma + 1)
        # 3. Accept while equal. The first difference is the target's own token: no pass is without one.
        num_accepted = 0
        while num_accepted < gamma and chosen[num_accepted] == proposal[num_accepted]:
            num_accepted += 1
        committed = chosen[: num_accepted + 1]
        if end in committed:
            return (token_ids + committed[: committed.index(end) + 1])[len(prompt) :]
        token_ids += committed
    return token_ids[len(prompt) :][:num_tokens]


def main() -> None:
    """Continue one prompt and print the text."""
    parser = argparse.ArgumentParser(description="Speculative decoding with shared noise, on one page.")
    parser.add_argument("--prompt", default="1, 2, 3, 4,")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--num_tokens", type=int, default=48)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    draft, target = (Model(MODELS / name, args.temperature, args.seed) for name in ("draft", "target"))
    prompt = tokenizer(args.prompt)["input_ids"]
    options = {"num_tokens": args.num_tokens, "gamma": args.gamma, "end": tokenizer.eos_token_id}
    print(args.prompt + tokenizer.decode(generate(draft, target, prompt, **options)))


if __name__ == "__main__":
    main()
