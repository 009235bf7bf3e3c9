"""Pass times of a target in seconds, by number of sessions and of draft tokens; old passes fade. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # weight of the past at each pass: about 50 passes count


@dataclass(slots=True)
class PassCosts:
    """Least-squares fit of pass time to draft tokens, for passes over one number of sessions; old passes fade."""

    _weight: float = 0.0
    _width: float = 0.0
    _time: float = 0.0
    _width_width: float = 0.0
    _width_time: float = 0.0

    def record(self, num_draft_tokens: int, seconds: float) -> None:
        """Record one pass; `num_draft_tokens` counts those of all its sessions."""
        width = num_draft_tokens
        self._weight = self._weight * DECAY + 1.0
        self._width = self._width * DECAY + width
        self._time = self._time * DECAY + seconds
        self._width_width = self._width_width * DECAY + width * width
        self._width_time = self._width_time * DECAY + width * seconds

    @property
    def slope_s(self) -> float:
        """Return the seconds per draft token; 0 while all passes had the same number of them."""
        spread = self._weight * self._width_width - self._width**2
        if spread <= 1e-9 * self._width_width or not self._weight:
            return 0.0
        return max(0.0, (self._weight * self._width_time - self._width * self._time) / spread)

    @property
    def base_s(self) -> float:
        """Return the seconds of a pass without draft tokens; 0 while unknown."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._time - self.slope_s * self._width) / self._weight)


class PassTimes:
    """Pass times by number of sessions, since a session costs other time than a draft token, in attention say."""

    def __init__(self) -> None:
        self._by_sessions: dict[int, PassCosts] = {}

    def record(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None:
        """Record one pass. The first over `num_sessions` is ignored: in it a backend may prepare the later ones."""
        if num_sessions not in self._by_sessions:
            self._by_sessions[num_sessions] = PassCosts()
        else:
            self._by_sessions[num_sessions].record(num_draft_tokens, seconds)

    def of(self, num_sessions: int) -> PassCosts:
        """Return the costs of passes over `num_sessions`, or else over the nearest number known; all 0 if none is."""
        known = [number for number, costs in self._by_sessions.items() if costs.base_s]
        if not known:
            return PassCosts()
        return self._by_sessions[min(known, key=lambda number: abs(number - num_sessions))]
