"""Draft tokens of the requests in an engine core: a tree per request, how long a pass waits, how many it verifies.

Knows nothing of vLLM. The mailbox's thread brings draft tokens from the front, this project's server or pool; the
core's thread asks for the next pass, and reports it. A lock lies between the two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from specdec.inference.commit import NO_OWN_DRAFTS, OwnDrafts
from specdec.inference.model.decoder import Verdict
from specdec.inference.scheduling.lookups import Lookups
from specdec.inference.scheduling.pass_times import PassCosts, PassTimes
from specdec.inference.scheduling.widths import choose_widths
from specdec.inference.speculation.answers import KeptAnswers, Origin
from specdec.inference.speculation.lookup import Lookup
from specdec.inference.speculation.sources import Sources
from specdec.inference.vllm.frames import Grow, Has, Help, Hold, Row, ToCore, Wanted

UNKNOWN = Origin("", ())
"""Origin of the answer to a request of which neither prompt nor account is known."""


class Drafted:
    """Request in an engine core of vLLM, with its draft tokens.

    Args:
        lookup: prompt lookup for the request, in its own text and in others.
        name, token_ids, gamma, origin, wanted: the attributes.

    Attributes:
        name: name of the request in messages to and from this project's server or pool.
        token_ids: prompt, and output up to now.
        gamma: most draft tokens of a pass.
        origin: origin of its answer, by which the answer is kept.
        wanted: the request as a pool's draft workers need it; None if this project's server has sent the request.
        sources: its draft tokens, and estimates of their worth.
        help: number that marks the request's present draft worker, higher at each change; None if no worker drafts.
        is_lookup: True if the last proposal was looked up, in the request's own text or in one that it may repeat.
        since: monotonic second from which the request could have been in a pass.
    """

    def __init__(
        self,
        name: str,
        token_ids: list[int],
        gamma: int,
        lookup: Lookup,
        origin: Origin,
        wanted: Wanted | None,
    ) -> None:
        self.name, self.token_ids, self.gamma, self.wanted, self.origin = name, token_ids, gamma, wanted, origin
        self.sources = Sources(token_ids, lookup, gamma)
        self.help: int | None = None
        self.is_lookup = False
        self.since = time.monotonic()

    @property
    def rate(self) -> float:
        """Return the probability that the target accepts a token of the last proposal."""
        return self.sources.lookup.rate if self.is_lookup else self.sources.draft_rate

    def has(self) -> Has:
        """Return the message that announces this request to this project's server, or with its tokens to a pool."""
        if self.wanted is None:
            return Has(self.name)
        left = self.wanted.max_new_tokens - (len(self.token_ids) - self.wanted.output_start)
        return Has(self.name, replace(self.wanted, token_ids=list(self.token_ids), max_new_tokens=max(1, left)))

    def follow(self, help_: int | None) -> None:
        """Empty the draft tree, and from now on take tokens only from the draft worker with this number, if any."""
        self.help = help_
        self.sources.follow()

    def take(self, frame: Help | Grow) -> None:
        """Apply a message about this request: draft tokens, checked by the sender, or a change of draft worker."""
        if isinstance(frame, Help):
            self.follow(frame.help)
        elif self.help is not None:
            self.sources.grow(frame.branches)

    def path(self, limit: int, *, is_held: bool, looks: bool) -> list[int]:
        """Return the tokens that the next pass may verify: the draft worker's, or looked-up ones that promise more.

        Args:
            limit: most draft tokens of the pass.
            is_held: True if no tokens of a draft worker may be verified.
            looks: False if none should be looked up but in a text that the answer is expected to repeat.
        """
        is_alone = self.help is None or is_held
        path = [] if is_alone else self.sources.tree.path(limit)
        width = limit if looks or self.sources.lookup.guides else 0
        preferred = self.sources.preferred(width, len(path) or (0 if is_alone else limit))
        self.is_lookup = bool(preferred)
        return preferred or path

    def wait_s(self, limit: int, costs: PassCosts, now: float) -> float:
        """Return for how many more seconds a pass should wait for the draft worker's tokens; 0 or less: not at all.

        Args:
            limit: most draft tokens of the request in the pass.
            costs: costs of passes over this request alone.
            now: the present time, in monotonic seconds.
        """
        if self.help is None or not limit:
            return 0.0
        return self.sources.wait_s(costs, now=now, ready_s=now - self.since)

    def commit(
        self, token_ids: Sequence[int], proposal: Sequence[int], num_accepted: int, is_finite: bool, share: float
    ) -> Row:
        """Apply the tokens that a pass committed; return this request's row in the report on the pass.

        Args:
            token_ids: the tokens.
            proposal: draft tokens of the pass; -1 is one that only the device knows.
            num_accepted: number of the draft tokens that the target chose too.
            is_finite: False if the logits of the pass were not finite.
            share: of the tokens from prompt lookup, the share that passes without a draft worker's tokens verify.
        """
        self.since, position = time.monotonic(), len(self.token_ids)
        self.token_ids.extend(token_ids)
        told = [] if self.wanted is None else list(token_ids)
        if self.help is None and not proposal and not self.is_lookup:
            self.sources.replay.skip()
            return Row(self.name, position, len(token_ids), is_finite=is_finite, token_ids=told)
        num_drafts = len(proposal)
        rejected = [each for each in proposal[num_accepted:] if each >= 0]  # -1: a token that only the device knows
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
        looks_up: True if a pass without a worker's tokens verifies tokens that are looked up in the request's own text.
        num_bytes: memory, in bytes, for answers that were given before.
        is_hidden: True if vLLM's own speculator drafts: only the device knows its tokens, and each of them is -1 here.
    """

    def __init__(self, *, looks_up: bool = False, num_bytes: int = 0, is_hidden: bool = False) -> None:
        self._looks_up, self._is_hidden, self._answers = looks_up, is_hidden, KeptAnswers(num_bytes)
        self._requests: dict[str, Drafted] = {}
        self._is_held, self._lookups = False, Lookups()
        self._news = threading.Condition()
        self._times = PassTimes()

    def requests(self) -> Iterator[Has]:
        """Yield the message that announces each request to a new server; no request commits a token meanwhile."""
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
        origin: Origin = UNKNOWN,
        prediction: Sequence[int] = (),
    ) -> Has:
        """Add a request that has reached the engine core; return the message that announces it to the server or pool.

        Args:
            name: name of the request in messages to and from the server or pool.
            token_ids: prompt, and output up to now.
            gamma: most draft tokens of a pass.
            wanted: the request as a pool's draft workers need it; None if this project's server has sent the request.
            origin: origin of its answer, for lookups in answers that were given before.
            prediction: expected output.
        """
        with self._news:
            lookup = self._answers.lookup(origin, prediction, gamma if self._looks_up else 0)
            self._requests[name] = Drafted(name, list(token_ids), gamma, lookup, origin, wanted)
            return self._requests[name].has()

    def leave(self, name: str) -> None:
        """Remove a request that has ended, with its draft tokens, and keep its answer for later lookups."""
        with self._news:
            if (ended := self._requests.pop(name, None)) is not None:
                self._answers.add(ended.origin, ended.token_ids[len(ended.origin.prompt) :])

    def receive(self, frame: ToCore | None) -> None:
        """Apply a message of the server or pool; None: the link to it is lost, so no request has a draft worker."""
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
        """Return the draft tokens that the next pass verifies, per request in the order of `rooms`, as many as pay.

        Args:
            rooms: by name of each request that decodes in the pass, how many draft tokens fit before its end.
            may_wait: True if the core has no other work, so that the pass may wait for draft tokens while that pays.
        """
        with self._news:
            ready = [(each := self._requests[name], max(0, min(each.gamma, room))) for name, room in rooms.items()]
            looks, held = self._lookups.are_due, self._is_held
            while not any(paths := [each.path(limit, is_held=held, looks=looks) for each, limit in ready]) and may_wait:
                if held or (left_s := self._wait_s(ready)) <= 0:
                    break
                self._news.wait(left_s)
                held = self._is_held
            pairs = zip(paths, ready, strict=True)  # those without a path may look up what promises less than a draft
            paths = [path or each.path(limit, is_held=True, looks=looks) for path, (each, limit) in pairs]
            lengths, rates = list(map(len, paths)), [each.rate for each, _ in ready]
            widths = choose_widths(lengths, rates, self._times.of(len(ready)).seconds)
            is_own = all(each.is_lookup or not path for path, (each, _) in zip(paths, ready, strict=True))
            self._lookups.passed(len(ready), sum(lengths) if is_own else 0, sum(widths))
        return [path[:width] for path, width in zip(paths, widths, strict=True)]

    def _wait_s(self, ready: Sequence[tuple[Drafted, int]]) -> float:
        now, costs = time.monotonic(), self._times.of(1)
        return min((each.wait_s(limit, costs, now) for each, limit in ready), default=0.0)

    def passed(
        self,
        name: str,
        token_ids: Sequence[int],
        proposal: Sequence[int] = (),
        num_accepted: int = 0,
        *,
        is_finite: bool = True,
    ) -> Row:
        """Apply the tokens that a pass committed for a request; return the request's row in the report on the pass.

        Args:
            name: name of the request.
            token_ids: the tokens.
            proposal: draft tokens that the pass verified. With -1 among them it counts as empty, unless vLLM's own
                speculator drafts: it is then what vLLM puts in place of draft tokens.
            num_accepted: number of these that the target accepted.
            is_finite: False if the logits of the pass were not finite.
        """
        if -1 in proposal and not self._is_hidden:  # vLLM's padding of a request that waited
            proposal = ()
        with self._news:
            return self._requests[name].commit(token_ids, proposal, num_accepted, is_finite, self._lookups.share)

    def timed(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the seconds of a pass that read no prompt, so that the cost of draft tokens becomes known.

        `num_draft_tokens` is the sum over its `num_sessions` sessions.
        """
        self._times.record(num_sessions, num_draft_tokens, seconds)
