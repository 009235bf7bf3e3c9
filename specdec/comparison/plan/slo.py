"""Service level objectives, the limits that an answer must meet to count as goodput: `ttft:200ms,itl:50ms`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.inference.errors import ConfigError

FIGURES = {"ttft": "ttft_s", "itl": "inter_token_latency_s", "e2e": "end_to_end_latency_s"}
"""Names of the latencies in results, by their names in --slo."""
_LIMIT = re.compile(r"(\w+):(\d+(?:\.\d*)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of an answer's latencies in seconds, by their names in results. Without limits every answer is in time."""

    limits: tuple[tuple[str, float], ...] = ()

    def is_met(self, figures: Mapping[str, float | None]) -> bool:
        """Return whether the latencies of an answer are within all limits; one that is None counts as within.

        Args:
            figures: latencies in seconds, by their names in results, such as "ttft_s".
        """
        return all((figures[name] or 0.0) <= limit for name, limit in self.limits)

    def __str__(self) -> str:
        names = {figure: name for name, figure in FIGURES.items()}
        return ", ".join(f"{names[figure]} within {limit * 1e3:g} ms" for figure, limit in self.limits)


def parse_slo(text: str) -> Slo:
    """Return the limits that a flag's value describes.

    Raises:
        ConfigError: a part is not NAME:NUMBERms or NAME:NUMBERs, or a name is unknown or comes twice.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = _LIMIT.fullmatch(part.strip())
        if found is None or found[1] not in FIGURES or FIGURES[found[1]] in limits:
            raise ConfigError(f"slo {part!r} is not NAME:NUMBERms with each of {', '.join(FIGURES)} at most once")
        limits[FIGURES[found[1]]] = float(found[2]) / (1e3 if found[3] == "ms" else 1.0)
    return Slo(tuple(limits.items()))
