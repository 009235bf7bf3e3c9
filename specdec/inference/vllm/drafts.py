"""Draft tokens of the requests in an engine core: a tree per request, how long a pass waits, how many it verifies.

Knows nothing of vLLM. The mailbox's thread brings draft tokens; the core's thread asks for the next pass, and reports
it. A lock lies between the two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from specdec.inference.commit import NO_OWN_DRAFTS, OwnDrafts
from specdec.inference.engine.drafting import SHARE_WEIGHT
from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Verdict
from specdec.inference.scheduling.pass_times import PassCosts, PassTimes
from specdec.inference.scheduling.widths import choose_widths
from specdec.inference.speculation.answers import KeptAnswers, Origin
from specdec.inference.speculation.lookup import Lookup
from specdec.inference.speculation.sources import Sources
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm.frames import Grow, Has, Help, Hold, Row, ToCore, Wanted

logger = logging.getLogger(__name__)


class Drafted:
    """Request in an engine core of vLLM, with its draft tokens.

    Attributes:
        help: number of the request's present draft worker, counted from its first; None if none drafts.
        is_lookup: the last proposal was looked up in the request's own tokens.
        since: time from which the request could have been in a pass.
        wanted: the request as a pool's draft workers need it; None if this project's server has sent the request.
    """

    def __init__(
        self,
        name: str,
        token_ids: list[int],
        gamma: int,
        wanted: Wanted | None = None,
        lookup: Lookup | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.name, self.token_ids, self.gamma, self.wanted, self.origin = name, token_ids, gamma, wanted, origin
        self.sources = Sources(token_ids, lookup, 0 if lookup is None else gamma)
        self.help: int | None = None
        self.is_lookup = False
        self.since = time.monotonic()

    @property
    def rate(self) -> float:
        """Return the probability that the target accepts a token of the last proposal."""
        return self.sources.lookup.rate if self.is_lookup else self.sources.draft_rate

    def has(self) -> Has:
        """Return the message that announces this request to the front; to a pool, with the request's present tokens."""
        if self.wanted is None:
            return Has(self.name)
        left = self.wanted.max_new_tokens - (len(self.token_ids) - self.wanted.output_start)
        return Has(self.name, replace(self.wanted, token_ids=list(self.token_ids), max_new_tokens=max(1, left)))

    def follow(self, help_: int | None) -> None:
        """Empty the draft tree, and from now on take tokens only from the draft worker with this number, if any."""
        self.help = help_
        self.sources.follow()

    def take(self, frame: Help | Grow) -> None:
        """Apply a message about this request; after an invalid draft token, ignore all others of the same worker."""
        if isinstance(frame, Help):
            self.follow(frame.help)
        elif self.help is not None:
            try:
                self.sources.grow(
                    [Branch(each.parent_node, each.prefix_length, each.token_ids) for each in frame.chains]
                )
            except InvalidRequestError as exc:
                logger.warning("draft tokens are ignored from here on: %s", exc)
                self.follow(None)

    def limit(self, room: int) -> int:
        """Return the most draft tokens for the next pass, where `room` of them fit before the request's end."""
        return max(0, min(self.gamma, room))

    def path(self, room: int, *, is_held: bool) -> list[int]:
        """Return the tokens that the next pass may verify: the draft worker's, or looked-up ones that promise more.

        Args:
            room: as in `limit`.
            is_held: True if no tokens of a draft worker may be verified.
        """
        limit, is_alone = self.limit(room), self.help is None or is_held
        path = [] if is_alone else self.sources.tree.path(limit)
        preferred = self.sources.preferred(limit, len(path) or (0 if is_alone else limit))
        self.is_lookup = bool(preferred)
        return preferred or path

    def looked_up(self, room: int) -> list[int]:
        """Return draft tokens by prompt lookup, for a pass for which the draft worker has sent none."""
        limit = self.limit(room)
        token_ids = self.sources.replay.propose(limit)
        self.is_lookup = bool(token_ids)
        return token_ids

    def wait_s(self, room: int, costs: PassCosts, now: float) -> float:
        """Return the seconds for which a pass should wait for the draft worker's tokens; 0 for none."""
        if self.help is None or not self.limit(room):
            return 0.0
        return self.sources.wait_s(costs, now=now, ready_s=now - self.since)

    def commit(
        self, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int, is_finite: bool, share: float
    ) -> Row:
        """Apply the tokens that a pass committed; return this request's row in the report on the pass.

        Args:
            share: share of looked-up tokens that passes without a draft worker's verify.
        """
        self.since, position = time.monotonic(), len(self.token_ids)
        self.token_ids.extend(token_ids)
        told = [] if self.wanted is None else list(token_ids)
        if self.help is None and not proposal and not self.is_lookup:
            self.sources.replay.skip()
            return Row(self.name, position, len(token_ids), is_finite=is_finite, token_ids=told)
        num_drafts, rejected = (
            len(proposal),
            [each for each in proposal[num_accepted:] if each >= 0],
        )  # -1: unknown here
        if len(token_ids) <= num_accepted:  # a token ended the sequence: drafts after it do not count
            num_drafts = num_accepted = len(token_ids)
            rejected = []
        own = OwnDrafts(num_drafts, num_accepted) if self.is_lookup else NO_OWN_DRAFTS
        is_predicted = self.is_lookup and self.sources.lookup.is_prediction
        self.sources.tree.commit(token_ids)
        verdict = Verdict(tuple(token_ids), num_drafts, num_accepted, own=own)
        self.sources.record(verdict, self.since, lookup_share=share)
        counts = len(token_ids), num_drafts, num_accepted, self.help or 0, *self.sources.acknowledged(self.since)
        figures = rejected, self.is_lookup, is_finite, told, is_predicted, self.sources.num_plain
        return Row(self.name, position, *counts, *figures)


class Drafts:
    """Requests of one engine core, with their draft tokens.

    Args:
        looks_up: passes without a worker's tokens verify tokens found by prompt lookup.
        num_bytes: memory for answers that were given before.
        is_hidden: draft tokens are known on the device alone, and stand as -1 here.
    """

    def __init__(self, *, looks_up: bool = False, num_bytes: int = 0, is_hidden: bool = False) -> None:
        self._looks_up, self._is_hidden, self._answers = looks_up, is_hidden, KeptAnswers(num_bytes)
        self._requests: dict[str, Drafted] = {}
        self._is_held, self._lookup_share = False, 1.0
        self._news = threading.Condition()
        self._times = PassTimes()

    def requests(self) -> Iterator[Has]:
        """Yield the message that announces each request to a new front; no request commits a token meanwhile."""
        with self._news:
            for each in self._requests.values():
                yield each.has()

    def enter(
        self,
        name: str,
        token_ids: Sequence[int],
        gamma: int,
        wanted: Wanted | None = None,
        *,
        origin: Origin | None = None,
        prediction: Sequence[int] = (),
    ) -> Has:
        """Add a request that has reached the engine core; return the message that announces it to the front.

        Args:
            origin: origin of its answer; None: the answer is not kept.
        """
        with self._news:
            own_limit = gamma if self._looks_up else 0
            of_answers = origin and self._answers.lookup(origin, prediction, own_limit)
            lookup = of_answers or Lookup(own_limit=own_limit)
            self._requests[name] = Drafted(name, list(token_ids), gamma, wanted, lookup, origin)
            return self._requests[name].has()

    def leave(self, name: str) -> None:
        """Forget a request that has ended, with its draft tokens, and keep its answer."""
        with self._news:
            if (ended := self._requests.pop(name, None)) is not None and ended.origin is not None:
                self._answers.add(ended.origin, ended.token_ids[len(ended.origin.prompt) :])

    def receive(self, frame: ToCore | None) -> None:
        """Apply a message of the front; None: the link to it is lost, so no request has a draft worker any more."""
        with self._news:
            if frame is None:
                self._is_held = False
                for each in self._requests.values():
                    each.follow(None)
            elif isinstance(frame, Hold):
                self._is_held = frame.is_on
            elif (request := self._requests.get(frame.name)) is not None:
                request.take(frame)
            self._news.notify_all()

    def proposals(self, rooms: Mapping[str, int], *, may_wait: bool) -> list[list[int]]:
        """Return the draft tokens that the next pass verifies, per request, as many as pay.

        Args:
            rooms: numbers of draft tokens before the ends of the requests that decode in the pass, by name.
            may_wait: True if the core has no other work, so that the pass may wait for draft tokens while that pays.
        """
        with self._news:
            ready = [(self._requests[name], room) for name, room in rooms.items()]
            while not any(paths := [each.path(room, is_held=self._is_held) for each, room in ready]) and may_wait:
                if self._is_held or (left_s := self._wait_s(ready)) <= 0:
                    break
                self._news.wait(left_s)
            if self._looks_up:
                paths = [path or each.looked_up(room) for path, (each, room) in zip(paths, ready, strict=True)]
            if not any(paths):
                return paths
            rates, costs = [each.rate for each, _ in ready], self._times.of(len(ready))
            widths = choose_widths(list(map(len, paths)), rates, costs.seconds)
            if all(each.is_lookup or not path for path, (each, _) in zip(paths, ready, strict=True)):
                share = sum(widths) / sum(map(len, paths))
                self._lookup_share += SHARE_WEIGHT * (share - self._lookup_share)
        return [path[:width] for path, width in zip(paths, widths, strict=True)]

    def _wait_s(self, ready: Sequence[tuple[Drafted, int]]) -> float:
        now, costs = time.monotonic(), self._times.of(1)
        return min((each.wait_s(room, costs, now) for each, room in ready), default=0.0)

    def passed(
        self,
        name: str,
        token_ids: Sequence[int],
        proposal: Sequence[int] = (),
        num_accepted: int = 0,
        *,
        is_finite: bool = True,
    ) -> Row:
        """Apply the tokens that a pass committed for a request; return its row of the report."""
        if -1 in proposal and not self._is_hidden:  # vLLM's padding of a request that waited
            proposal = ()
        with self._news:
            return self._requests[name].commit(token_ids, proposal, num_accepted, is_finite, self._lookup_share)

    def timed(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the time of a pass in which all sessions decoded."""
        self._times.record(num_sessions, num_draft_tokens, seconds)
