"""Audit of an output: whether each of its tokens is the model's own choice, with given parameters and seed.

The target model reads prompt and output in one go, as it reads a prompt, and chooses its own token after each prefix of
the output. So a client can check what one server wrote by asking another server of the same model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.inference.commit import Started, TokenAudit
from specdec.inference.errors import InvalidRequestError
from specdec.inference.workers.completion import Codec, Completer, CompletionRequest

NEAR_TIE = 1e-3
"""Largest margin between the scores of two tokens at which rounding may decide which one is chosen (a near-tie).

Float32 logits differ by up to 3e-5 between passes over different numbers of tokens (docs/speculation.md).
"""


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit: a comparison of an output with the model's own choices.

    Attributes:
        tokens: comparison of each token of the output, up to a token that the grammar refuses.
        num_tokens: number of tokens of the output.
        seed: seed of the request; None if tokens are chosen greedily.
        near_tie: margin up to which rounding may have decided between a token and the model's choice.
    """

    tokens: tuple[TokenAudit, ...]
    num_tokens: int
    seed: int | None
    near_tie: float = NEAR_TIE

    @property
    def num_choices(self) -> int:
        return sum(each.is_choice for each in self.tokens)

    @property
    def num_near_ties(self) -> int:
        """Return the number of tokens that are not the model's choice, but have a margin of at most `near_tie`."""
        return sum(not each.is_choice and each.margin <= self.near_tie for each in self.tokens)

    @property
    def first_other(self) -> int | None:
        """Return the index of the first token that is neither the model's choice nor a near-tie; None if none is."""
        others = (i for i, each in enumerate(self.tokens) if not each.is_choice and each.margin > self.near_tie)
        return next(others, None)

    @property
    def holds(self) -> bool:
        return self.first_other is None and len(self.tokens) == self.num_tokens

    @property
    def verdict(self) -> str:
        """Return the result as a sentence for people."""
        law = "at temperature 0" if self.seed is None else f"at seed {self.seed}"
        if (place := self.first_other) is not None:
            each, more = self.tokens[place], len(self.tokens) - self.num_choices - self.num_near_ties - 1
            also = f"; {more} later ones are not either" if more else ""
            return f"token {place} is not this model's choice {law}: margin {each.margin:.3g}, rank {each.rank}{also}"
        ties = f", {self.num_near_ties} within rounding (margin up to {self.near_tie:g})" if self.num_near_ties else ""
        return f"all {self.num_tokens} tokens are this model's choice {law}{ties}"

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON, in which an infinite margin is null."""
        counts = {"num_tokens": self.num_tokens, "num_choices": self.num_choices, "num_near_ties": self.num_near_ties}
        summary = {"holds": self.holds, "verdict": self.verdict, **counts, "first_other": self.first_other}
        return {**summary, "tokens": [_as_json(each) for each in self.tokens]}


def _as_json(token: TokenAudit) -> dict[str, Any]:
    margin = token.margin if math.isfinite(token.margin) else None
    return {**asdict(token), "margin": margin, "is_choice": token.is_choice}


async def audited(
    completer: Completer,
    codec: Codec | None,
    request: CompletionRequest,
    output: str | Sequence[int],
    near_tie: float = NEAR_TIE,
) -> Audit:
    """Compare an output with the choices of the model behind `completer`, token by token.

    The model may have written a text with other tokens than the tokenizer makes of it. So where a token is not the
    model's choice, but the text continues with the text of that choice, the rest is tokenized again behind the choice.

    Args:
        codec: tokenizer of the model; needed if the output is a text.
        request: prompt, parameters and seed with which the output was made.
        output: text, or token ids.
        near_tie: margin up to which rounding may have decided between a token and the model's choice.

    Raises:
        InvalidRequestError: the output has no token or does not fit the model's context or vocabulary, a sampled output
            has no seed, or the server cannot audit.
    """
    if request.seed is None and not request.sampling.greedy:
        raise InvalidRequestError("seed: an output at a temperature above 0 is audited with its seed", field="seed")
    asked = replace(request, gamma=0, echo=False, prompt_logprobs=None, logprobs=None)
    seed = None if request.sampling.greedy else request.seed
    if not isinstance(output, str):
        return Audit(await _compared(completer, asked, tuple(output)), len(output), seed, near_tie)
    if codec is None:
        raise InvalidRequestError("output: this server has no tokenizer; give token ids", field="output")
    token_ids = await codec.encode(output, special=False)
    while True:
        found = Audit(await _compared(completer, asked, token_ids), len(token_ids), seed, near_tie)
        if (place := found.first_other) is None:
            return found
        begun = (*token_ids[:place], found.tokens[place].choice)
        text = await codec.decode(begun)
        if not output.startswith(text):
            return found
        token_ids = (*begun, *(await codec.encode(output[len(text) :], special=False) if text != output else ()))


async def _compared(
    completer: Completer, request: CompletionRequest, token_ids: tuple[int, ...]
) -> tuple[TokenAudit, ...]:
    async with aclosing(completer.complete(replace(request, audit=token_ids, max_new_tokens=0))) as events:
        async for event in events:
            if isinstance(event, Started) and event.audits:
                return event.audits
    raise InvalidRequestError("audit: this server knows none", field="audit")
