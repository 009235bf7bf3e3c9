"""The target behind a draft worker that serves: which model it is now, and whether this draft fits it.

A target may be replaced at any time, by another model under the same address. What clients are told of it, and how
conversations are written for it, changes with it; and a draft of another vocabulary has nothing to offer it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from inference.errors import IncompatibleDraftError, SpecDecError
from inference.text.vocabulary import Vocabulary, require_one_vocabulary
from inference.workers.completion import ModelCard
from inference.workers.fleet import Fleet
from inference.workers.remote import card_of_target

logger = logging.getLogger(__name__)


class TargetBehind:
    """What is known of the target behind a fleet's addresses.

    Args:
        words: vocabulary of the draft.
    """

    def __init__(self, fleet: Fleet, words: Vocabulary) -> None:
        self._fleet = fleet
        self._words = words
        self.card: ModelCard | None = None
        self.serves = True  # or it would not have been dialled
        self._fault = ""  # why it is of no use, as the log has it

    async def ask(self) -> ModelCard | None:
        """Its card; None of a target that has none, or does not answer.

        Raises:
            IncompatibleDraftError: it is no target, or one of another vocabulary.
        """
        card = await card_of_target(self._fleet)
        if card is not None:
            require_one_vocabulary(self._words, Vocabulary(card.tokenizer_fingerprint, card.vocab_size))
        return card

    async def follow(self, adopt: Callable[[ModelCard], Awaitable[None]]) -> AsyncGenerator[bool, None]:
        """Whether it serves, and this draft fits it, now and whenever that changes; for ever.

        Args:
            adopt: is told of its card before, when that is another one.
        """
        async with aclosing(self._fleet.serves()) as changes:
            async for serves in changes:
                self.serves = serves and await self._fits(adopt)
                yield self.serves

    async def _fits(self, adopt: Callable[[ModelCard], Awaitable[None]]) -> bool:
        try:
            card = await self.ask()
            if card is not None and card != self.card:
                await adopt(card)
                self.card = card
        except SpecDecError as exc:
            if str(exc) != self._fault:
                logger.error("not ready until another target is at %s: %s", self._fleet.label, exc)
            self._fault = str(exc)
            if not isinstance(exc, IncompatibleDraftError):  # such as a token that it does not take at present
                self._fleet.look_again()
            return False
        self._fault = ""
        if card is None:  # it did not answer, and may be another one
            self._fleet.look_again()
        return True

    async def is_serving(self) -> bool:
        """What `follow` said last."""
        return self.serves
