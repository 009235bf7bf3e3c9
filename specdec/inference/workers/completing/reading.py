"""Translation of a client's request, whose prompt may be a text, into an engine's, which has token ids and a seed."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import replace

from specdec.inference.caller import caller
from specdec.inference.errors import ContextLengthError, InvalidRequestError
from specdec.inference.request import (
    NO_DEFAULTS,
    GenerationRequest,
    Grammar,
    Preamble,
    RequestDefaults,
    SeedScope,
    check_logit_bias,
)
from specdec.inference.sampling.noise import seed_of_prompt
from specdec.inference.text.reasoning import is_begun, is_over
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.prompt import LocalCodec
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES, CompletionRequest

_END_TOKENS = 16
"""Number of tokens at a prompt's end that are searched for <think> or </think>, which begin or end reasoning."""


class Reader:
    """Reader of clients' requests for one model, which translates them into requests to an engine.

    A draft worker in a client's process reads a request with the same result as the server that answers it.

    Args:
        tokenizer: tokenizer of the model, with its chat template.
        max_length: most tokens of prompt and output together.
        vocab_size: number of token ids.
        defaults: values for parameters that requests leave open.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, vocab_size: int, defaults: RequestDefaults = NO_DEFAULTS
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.defaults = defaults
        self.codec = LocalCodec(tokenizer, vocab_size=vocab_size, max_length=max_length)

    async def read(self, request: CompletionRequest) -> GenerationRequest:
        """Return the request to the engine for a client's whole request, as if no server had begun its answer.

        Args:
            request: request that leaves no parameter open, as `CompletionRequest.resolved` returns it. Only its seed
                may be missing; then `seed_of` gives one.

        Raises:
            InvalidRequestError: a text is too long, the prompt is empty, or logit_bias has an unknown id.
            CapacityError: too many long prompts are being read.
        """
        prompt = request.prompt
        token_ids = self.codec.checked(prompt) if isinstance(prompt, tuple) else await self.codec.encode(prompt)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it has no token", field="prompt")
        check_logit_bias(request.sampling, vocab_size=self.vocab_size)
        seed = seed_of(request)
        if request.seed_scope is SeedScope.PROMPT:
            seed = seed_of_prompt(seed, digest(token_ids))
        here = {
            "grammar": self._after_prompt(token_ids, request.grammar),
            "cache_salt": caller().cache_salt(request.cache_salt),
        }
        generation = GenerationRequest(
            token_ids,
            replace(request.sampling, seed=seed),
            max(1, request.max_new_tokens or 0),  # 0 reads the prompt, which a pass of one token does
            stop_at_eos=not request.ignore_eos,
            prediction=await self._predicted(request.prediction),
            **request.options | here,
        )
        # A draft must follow the same sampling, and only the tokenizer knows the end tokens.
        return replace(generation, sampling=generation.effective_sampling(self.tokenizer.eos_token_ids))

    async def _predicted(self, text: str) -> tuple[int, ...]:
        try:
            return await self.codec.encode(text, special=False) if text else ()
        except ContextLengthError as exc:
            raise InvalidRequestError(f"prediction: {exc.message}", field="prediction") from exc

    def _after_prompt(self, prompt: tuple[int, ...], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar for the text after the prompt, whose end may have begun a reasoning already, or ended it.

        The result depends on nothing but the grammar and the prompt, so that every process gets the same.
        """
        if grammar is None or grammar.preamble is Preamble.NONE:
            return grammar
        end = self.tokenizer.decode(prompt[-_END_TOKENS:], special=True)
        if is_over(end):
            return replace(grammar, preamble=Preamble.NONE)
        return replace(grammar, preamble=Preamble.REST_OF_REASONING) if is_begun(end) else grammar


def digest(token_ids: Sequence[int]) -> str:
    """Return 16 hex digits of SHA-256 over token ids, each as 32 bits, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()[:16]


def seed_of(request: CompletionRequest) -> int:
    """Return a request's seed; without one, a seed made from `draft_session`; without that, a random seed.

    `draft_session` is the name under which a client's own draft worker drafts for the request. It gives the same seed
    in every process.
    """
    if request.seed is not None:
        return request.seed
    if not request.draft_session:
        return secrets.randbits(64)
    return int(request.draft_session[-2 * DRAFT_SESSION_BYTES :][:16], 16)
