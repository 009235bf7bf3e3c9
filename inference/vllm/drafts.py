"""Drafts of the requests in one engine core: a tree each, how long a pass waits for them, and how many it verifies.

Knows nothing of vLLM. The mailbox's thread brings draft tokens; the core's thread asks for the next pass, and reports
it. A lock lies between the two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from specdec.inference.commit import NO_OWN_DRAFTS, OwnDrafts
from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Verdict
from specdec.inference.scheduling.pass_times import PassTimes
from specdec.inference.scheduling.widths import Widths
from specdec.inference.speculation.sources import Sources
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm.frames import End, Grow, Has, Help, Row, ToCore, Wanted

logger = logging.getLogger(__name__)


class Drafted:
    """Request with its draft tokens.

    Attributes:
        help: number of the help of the draft worker that drafts now; None if none does.
        filled: the last proposal was looked up by vLLM.
        since: time from which the request could have been in a pass.
        wanted: the request for a pool; None where the front has it.
    """

    def __init__(self, token_ids: list[int], gamma: int, wanted: Wanted | None = None) -> None:
        self.token_ids, self.gamma, self.wanted = token_ids, gamma, wanted
        self.sources = Sources(token_ids)
        self.help: int | None = None
        self.filled = False
        self.since = time.monotonic()

    @property
    def rate(self) -> float:
        """Return the probability that the target accepts a token of the last proposal."""
        return self.sources.lookup.rate if self.filled else self.sources.draft_rate

    def has(self, name: str) -> Has:
        """Return the frame that names this request, as it is now."""
        if self.wanted is None:
            return Has(name)
        left = self.wanted.max_new_tokens - (len(self.token_ids) - self.wanted.output_start)
        return Has(name, replace(self.wanted, token_ids=list(self.token_ids), max_new_tokens=max(1, left)))

    def follow(self, help_: int | None) -> None:
        """Begin the help of a worker under this number, with a new tree; None ends the help."""
        self.help = help_
        self.sources.follow()

    def grow(self, branches: Sequence[Branch]) -> None:
        """Add branches to the tree; a wrong one, which the front refuses already, ends the help."""
        if self.help is None:
            return
        try:
            self.sources.grow(branches)
        except InvalidRequestError as exc:
            logger.warning("draft tokens are ignored from here on: %s", exc)
            self.follow(None)

    def limit(self, room: int) -> int:
        """Return the most draft tokens of the next pass, if `room` are left before the end; 0 without a worker."""
        return 0 if self.help is None else max(0, min(self.gamma, room))

    def commit(self, name: str, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int) -> Row:
        """Apply a pass, and return its row of the report."""
        self.since, position = time.monotonic(), len(self.token_ids)
        self.token_ids.extend(token_ids)
        if not self.filled and -1 in proposal:  # vLLM's padding of a request that waited
            proposal = ()
        num_drafts, rejected = len(proposal), proposal[num_accepted:]
        if len(token_ids) <= num_accepted:  # a token ended the sequence: drafts after it do not count
            num_drafts = num_accepted = len(token_ids)
            rejected = ()
        own = OwnDrafts(num_drafts, num_accepted) if self.filled else NO_OWN_DRAFTS
        self.sources.tree.commit(token_ids)
        self.sources.record(Verdict(tuple(token_ids), num_drafts, num_accepted, own=own), self.since)
        counts = len(token_ids), num_drafts, num_accepted, self.help or 0
        known = [each for each in rejected if each >= 0]
        told = [] if self.wanted is None else list(token_ids)
        acknowledged = self.sources.acknowledged(self.since)
        return Row(name, position, *counts, *acknowledged, known, is_lookup=self.filled, token_ids=told)


@dataclass(frozen=True, slots=True)
class Ready:
    """Request that decodes in the next pass.

    Attributes:
        room: number of draft tokens before its end.
        lookup: draft tokens of vLLM's own, for a pass without a worker's; -1 where they are on the device alone.
    """

    name: str
    room: int
    lookup: Sequence[int] = ()


class Drafts:
    """Requests of one engine core."""

    def __init__(self) -> None:
        self._requests: dict[str, Drafted] = {}
        self._news = threading.Condition()
        self._times = PassTimes()
        self._widths = Widths()

    def requests(self) -> Iterator[Has]:
        """Yield the frames that name all requests; none of them commits meanwhile."""
        with self._news:
            for name, each in self._requests.items():
                yield each.has(name)

    def enter(self, name: str, token_ids: Sequence[int], gamma: int, wanted: Wanted | None = None) -> Has:
        """Take a new request; return the frame that names it."""
        with self._news:
            self._requests[name] = Drafted(list(token_ids), gamma, wanted=wanted)
            return self._requests[name].has(name)

    def leave(self, name: str) -> None:
        """Forget a request."""
        with self._news:
            self._requests.pop(name, None)

    def receive(self, frame: ToCore | None) -> None:
        """Take a frame of the front; None ends the help of all requests, since the link to the front is lost."""
        with self._news:
            if frame is None:
                for each in self._requests.values():
                    each.follow(None)
            elif (request := self._requests.get(frame.name)) is not None:
                _apply(request, frame)
            self._news.notify_all()

    def proposals(self, ready: Sequence[Ready], *, may_wait: bool) -> list[list[int]]:
        """Return the draft tokens that the next pass verifies, per request, as many as pay.

        Args:
            ready: requests that decode in the pass.
            may_wait: nothing else is to be done meanwhile, so the pass may wait for draft tokens as long as that pays.
        """
        with self._news:
            paths = self._paths(ready)
            while may_wait and (left_s := self._wait_s(ready, paths)) > 0:
                self._news.wait(left_s)
                paths = self._paths(ready)
            paths = [path or self._filled(turn) for path, turn in zip(paths, ready, strict=True)]
            rates = [self._requests[each.name].rate for each in ready]
            widths = self._widths.choose([len(path) for path in paths], rates, self._times.of(len(ready)))
        return [path[:width] for path, width in zip(paths, widths, strict=True)]

    def _paths(self, ready: Sequence[Ready]) -> list[list[int]]:
        requests = [(self._requests[each.name], each.room) for each in ready]
        for request, _ in requests:
            request.filled = False
        return [request.sources.tree.path(request.limit(room)) for request, room in requests]

    def _filled(self, turn: Ready) -> list[int]:
        """Return vLLM's own draft tokens, for a request that has no worker's."""
        request = self._requests[turn.name]
        lookup = list(turn.lookup[: max(0, min(request.gamma, turn.room))])
        request.filled = bool(lookup)
        return lookup

    def _wait_s(self, ready: Sequence[Ready], paths: Sequence[list[int]]) -> float:
        """Return the seconds for which a pass over requests that all lack draft tokens had better wait; 0 for none."""
        requests = [self._requests[each.name] for each in ready if self._requests[each.name].limit(each.room)]
        if not ready or any(paths) or len(requests) < len(ready):
            return 0.0
        now, costs = time.monotonic(), self._times.of(1)
        return min(each.sources.wait_s(costs, now=now, ready_s=now - each.since) for each in requests)

    def passed(self, name: str, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int) -> Row | None:
        """Commit the tokens of one request; return its row of the report, or None for an unknown request."""
        with self._news:
            request = self._requests.get(name)
            return None if request is None else request.commit(name, token_ids, proposal, num_accepted)

    def timed(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the time of a pass in which all sessions decoded."""
        self._times.record(num_sessions, num_draft_tokens, seconds)


def _apply(request: Drafted, frame: ToCore) -> None:
    if isinstance(frame, Help):
        request.follow(frame.help)
    elif isinstance(frame, End):
        request.follow(None)
    elif isinstance(frame, Grow):
        request.grow([Branch(each.parent_node, each.prefix_length, each.token_ids) for each in frame.chains])
