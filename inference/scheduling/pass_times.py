"""What a target's passes take, by number of sessions and of draft tokens: measured, decayed, in seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # weight of the past per pass: about 50 passes are remembered


@dataclass(slots=True)
class PassCosts:
    """Decayed least squares of pass time over draft tokens, for passes over one number of sessions."""

    _weight: float = 0.0
    _width: float = 0.0
    _time: float = 0.0
    _width_width: float = 0.0
    _width_time: float = 0.0

    def record(self, num_draft_tokens: int, seconds: float) -> None:
        """Take in one pass that verified so many draft tokens, of all its sessions together."""
        width = num_draft_tokens
        self._weight = self._weight * DECAY + 1.0
        self._width = self._width * DECAY + width
        self._time = self._time * DECAY + seconds
        self._width_width = self._width_width * DECAY + width * width
        self._width_time = self._width_time * DECAY + width * seconds

    @property
    def slope_s(self) -> float:
        """Seconds per draft token; 0 while all passes had the same number of them."""
        spread = self._weight * self._width_width - self._width**2
        if spread <= 1e-9 * self._width_width or not self._weight:
            return 0.0
        return max(0.0, (self._weight * self._width_time - self._width * self._time) / spread)

    @property
    def base_s(self) -> float:
        """Seconds of a pass without draft tokens; 0 while unknown."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._time - self.slope_s * self._width) / self._weight)


class PassTimes:
    """Pass times by number of sessions. A session more costs other than a draft token more: attention, for one."""

    def __init__(self) -> None:
        self._by_sessions: dict[int, PassCosts] = {}

    def record(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Take in one pass. The first over so many sessions says nothing: a backend prepares for the later ones."""
        if num_sessions not in self._by_sessions:
            self._by_sessions[num_sessions] = PassCosts()
        else:
            self._by_sessions[num_sessions].record(num_draft_tokens, seconds)

    def of(self, num_sessions: int) -> PassCosts:
        """For passes over so many sessions, or the nearest number that was seen; nothing is known before."""
        known = [number for number, costs in self._by_sessions.items() if costs.base_s]
        if not known:
            return PassCosts()
        return self._by_sessions[min(known, key=lambda number: abs(number - num_sessions))]
