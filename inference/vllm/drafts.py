"""Drafts of the requests in one engine core: a tree each, how long a pass waits for them, and how many it verifies.

Knows nothing of vLLM. The mailbox's thread brings draft tokens; the core's thread asks for the next pass, and reports
it. A lock lies between the two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from specdec.inference.errors import InvalidRequestError
from specdec.inference.scheduling.acceptance import Acceptance
from specdec.inference.scheduling.pass_times import PassTimes
from specdec.inference.scheduling.waiting import Arrivals, wait_s
from specdec.inference.scheduling.widths import Widths
from specdec.inference.speculation.tree import Branch, DraftTree
from specdec.inference.vllm.frames import End, Grow, Has, Help, Row, ToCore, Wanted

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Drafted:
    """Request with its draft tree.

    Attributes:
        token_ids: prompt and committed output.
        gamma: most draft tokens of a pass.
        tree: draft tokens of the worker that helps now; None if none does.
        help: number of that help.
        since: time from which the request could have been in a pass.
        wanted: the request for a pool; None where the front has it.
    """

    token_ids: list[int]
    gamma: int
    tree: DraftTree | None = None
    help: int = 0
    num_acknowledged: int = 0
    last_at: float = 0.0
    since: float = field(default_factory=time.monotonic)
    arrivals: Arrivals = field(default_factory=Arrivals)
    acceptance: Acceptance = field(default_factory=Acceptance)
    wanted: Wanted | None = None

    def has(self, name: str) -> Has:
        """Return the frame that names this request, as it is now."""
        if self.wanted is None:
            return Has(name)
        left = self.wanted.max_new_tokens - (len(self.token_ids) - self.wanted.output_start)
        return Has(name, replace(self.wanted, token_ids=list(self.token_ids), max_new_tokens=max(1, left)))

    def follow(self, help_: int | None) -> None:
        """Begin the help of a worker under this number, with a new tree; None ends the help."""
        self.tree = None if help_ is None else DraftTree(self.token_ids)
        self.help = help_ or 0
        self.num_acknowledged, self.arrivals = 0, Arrivals()

    def grow(self, branches: Sequence[Branch]) -> None:
        """Add branches to the tree; a wrong one, which the front refuses already, ends the help."""
        if self.tree is None:
            return
        self.last_at, num_live = time.monotonic(), len(self.tree)
        try:
            for branch in branches:
                self.tree.grow(branch)
        except InvalidRequestError as exc:
            logger.warning("draft tokens are ignored from here on: %s", exc)
            self.follow(None)
            return
        if len(self.tree) > num_live:
            self.arrivals.proposed(self.last_at, len(self.tree) - num_live)

    def commit(self, name: str, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int) -> Row:
        """Apply a pass, and return its row of the report."""
        now, position = time.monotonic(), len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.since = now
        num_drafts, rejected = len(proposal), proposal[num_accepted:]
        if len(token_ids) <= num_accepted:  # a token ended the sequence: drafts after it do not count
            num_drafts = num_accepted = len(token_ids)
            rejected = ()
        self.acceptance.record(num_drafts, num_accepted)
        num_received = hold_us = 0
        if self.tree is not None:
            self.tree.commit(token_ids)
            self.arrivals.committed(now, all_accepted=num_accepted == num_drafts)
            if self.tree.num_numbers != self.num_acknowledged:
                num_received = self.num_acknowledged = self.tree.num_numbers
                hold_us = round((now - self.last_at) * 1e6)
        counts = len(token_ids), num_drafts, num_accepted, self.help, num_received, hold_us
        told = [] if self.wanted is None else list(token_ids)
        return Row(name, position, *counts, rejected=list(rejected), token_ids=told)


@dataclass(frozen=True, slots=True)
class Ready:
    """Request that decodes in the next pass; `room` is the number of draft tokens before its end."""

    name: str
    room: int


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
            rates = [self._requests[each.name].acceptance.rate for each in ready]
            widths = self._widths.choose([len(path) for path in paths], rates, self._times.of(len(ready)))
        return [path[:width] for path, width in zip(paths, widths, strict=True)]

    def _paths(self, ready: Sequence[Ready]) -> list[list[int]]:
        return [_path(self._requests[each.name], each.room) for each in ready]

    def _wait_s(self, ready: Sequence[Ready], paths: Sequence[list[int]]) -> float:
        """Return the seconds for which a pass over requests that all lack draft tokens had better wait; 0 for none."""
        requests = [self._requests[each.name] for each in ready]
        helped = [
            bool(each.tree is not None and each.gamma and turn.room > 0)
            for each, turn in zip(requests, ready, strict=True)
        ]
        if not requests or any(paths) or not all(helped):
            return 0.0
        now, costs = time.monotonic(), self._times.of(1)
        return min(wait_s(r.arrivals, r.acceptance.rate, costs, now=now, ready_s=now - r.since) for r in requests)

    def passed(self, name: str, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int) -> Row | None:
        """Commit the tokens of one request; return its row of the report, or None for an unknown request."""
        with self._news:
            request = self._requests.get(name)
            return None if request is None else request.commit(name, token_ids, proposal, num_accepted)

    def timed(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the time of a pass in which all sessions decoded."""
        self._times.record(num_sessions, num_draft_tokens, seconds)


def _path(request: Drafted, room: int) -> list[int]:
    limit = min(request.gamma, room)
    return request.tree.path(limit) if request.tree is not None and limit > 0 else []


def _apply(request: Drafted, frame: ToCore) -> None:
    if isinstance(frame, Help):
        request.follow(frame.help)
    elif isinstance(frame, End):
        request.follow(None)
    elif isinstance(frame, Grow):
        request.grow([Branch(each.parent_node, each.prefix_length, each.token_ids) for each in frame.chains])
