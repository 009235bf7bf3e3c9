"""Engine of a draft model: each step extends the draft tokens of many sessions together.

The draft tokens of a session are a chain after its committed tokens, and branches beside the chain (draft_session.py).
A session's window is the number of tokens that its chain should have. The engine extends every shorter chain, until the
proposer has no more tokens for it, and also the branches that the session wants. In a synchronous round the caller sets
the window, waits for the chain, and sets the window to 0; a session that runs ahead keeps its window.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.inference.engine.draft_session import DraftedSequence, DraftPath, DraftSession
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.loop import Engine
from specdec.inference.model.decoder import Matcher
from specdec.inference.model.proposer import Draft, DraftToken, Proposer
from specdec.inference.model.token_map import SAME_IDS, TokenMap
from specdec.inference.request import Grammar, SamplingParams
from specdec.inference.scheduling.acceptance import Confidence
from specdec.inference.scheduling.pacing import Pacing
from specdec.inference.speculation.grammar import was_step
from specdec.inference.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TargetWords:
    """Vocabulary of a target, for a draft model with another tokenizer that drafts for it.

    Attributes:
        vocabulary: the target's vocabulary, to which the ids of the draft tokens belong.
        token_map: map from the target's token ids to the draft model's.
        grammars: compiler of grammars over the target's vocabulary; None if the grammars of requests are ignored.
    """

    vocabulary: Vocabulary
    token_map: TokenMap = SAME_IDS
    grammars: Grammars | None = None


_NUM_STEPS = 15  # steps in the median; few, since the first ones of a process are slow
_Extension = list[DraftToken] | None


@dataclass(frozen=True, slots=True)
class _Extending:
    """Chain or branch of a session that one step extends.

    Attributes:
        path: the chain or branch.
        draft: the input by which the proposer extends it.
        ranked: True if each new token needs its runner-up, the second best token, and the margin between their scores.
    """

    path: DraftPath
    draft: Draft
    ranked: bool


class DraftEngine(Engine[DraftSession, _Extending, _Extension]):
    """Engine that extends the chains of many sessions together, by calls of one proposer.

    Args:
        proposer: source of the draft tokens.
        max_waiting: most sessions that may wait for a slot.
        grammars: compiler of grammars over the target's tokens; without it the engine ignores the grammars of requests.
        prefix_caching: True if a session may reuse a prefix that an earlier one left in a slot.
        token_map: map from the target's token ids to the draft model's, for sessions whose target has the tokenizer
            for which the proposer was loaded.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_waiting: int = 64,
        grammars: Grammars | None = None,
        prefix_caching: bool = True,
        token_map: TokenMap = SAME_IDS,
    ) -> None:
        super().__init__(proposer, max_waiting=max_waiting, prefix_caching=prefix_caching)
        self._proposer = proposer
        self._grammars = grammars
        self._token_map = token_map
        self._confidence = Confidence()
        self.num_branches = proposer.num_branches
        self._recent_steps_s: deque[float] = deque(maxlen=_NUM_STEPS)

    @property
    def step_s(self) -> float:
        """Return the recent median time of one step, in seconds; 0 while unknown."""
        return statistics.median(self._recent_steps_s) if self._recent_steps_s else 0.0

    async def compiled(self, grammar: Grammar | None, words: TargetWords | None = None) -> Matcher | None:
        """Compile a request's grammar for its session.

        Returns None if the request has no grammar, or if there is no compiler for it, so that drafting ignores it.

        Args:
            grammar: the grammar as the request gives it; None if it has none.
            words: the target's vocabulary and its compiler; None if it is the vocabulary for which the engine was made.

        Raises:
            InvalidRequestError: the grammar has a fault.
            CapacityError: too many grammars are being compiled.
        """
        grammars = self._grammars if words is None else words.grammars
        return None if grammar is None or grammars is None else await grammars.matcher(grammar)

    def open(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_start: int | None = None,
        cache_salt: str = "",
        vocab_size: int | None = None,
        words: TargetWords | None = None,
    ) -> DraftSession:
        """Queue a sequence for a slot of the draft model.

        Args:
            token_ids: the prompt, then the output so far.
            sampling: the request's sampling parameters.
            output_start: position of the first output token; None if there is no output yet.
            cache_salt: the request's cache salt; sequences with different salts share no cached tokens.
            vocab_size: number of the target's token ids; None if every token id of the draft is one of the target's.
            words: the target's vocabulary; None if it is the one for which the engine was made.

        Raises:
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """
        token_map = self._token_map if words is None else words.token_map
        if vocab_size is not None:
            token_map = replace(token_map, num_ids=vocab_size)
        session = DraftSession(
            DraftedSequence(token_ids, sampling, output_start, cache_salt, token_map),
            num_slots=self._proposer.num_slots,
            num_branches=self.num_branches,
            confidence=self._confidence,
        )
        self._enter(session)
        return session

    async def propose(self, session: DraftSession, num_tokens: int) -> tuple[int, ...]:
        """Return up to `num_tokens` draft tokens after the committed ones, for a synchronous round."""
        self.pace(session, Pacing(window=num_tokens))
        chain = await session.drafted()
        session.pacing = Pacing()
        return tuple(chain)

    def pace(self, session: DraftSession, pacing: Pacing) -> None:
        """Set how many draft tokens and branches a session makes from now on."""
        session.pace(pacing)
        self._wake_for(session)

    def commit(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Add tokens that the target committed to a session, which then drafts after them."""
        session.commit(token_ids)
        self._wake_for(session)

    def _wake_for(self, session: DraftSession) -> None:
        """Wake the engine's loop if this session wants draft tokens, or if its slot may now go to a waiting account."""
        if session.pacing.window or self._admission.is_awaited:
            self.wake()

    def _schedule(self, sessions: Sequence[DraftSession]) -> list[tuple[DraftSession, _Extending]]:
        return [
            (session, _Extending(path, session.draft(path), ranked=session.pacing.min_survival > 0))
            for session in sessions
            for path in session.growing(self._proposer.max_length)
        ]

    def _compute(self, work: list[_Extending]) -> list[_Extension]:
        drafts, started = [piece.draft for piece in work], time.monotonic()
        extensions = self._proposer.extend(drafts, ranked=any(piece.ranked for piece in work))
        elapsed_s = time.monotonic() - started
        if was_step(extensions):
            self._recent_steps_s.append(elapsed_s)
        return extensions

    def _deliver(self, session: DraftSession, work: _Extending, result: _Extension) -> None:
        session.is_suspect = False
        if result is not None:
            session.extend(work.path, result)
