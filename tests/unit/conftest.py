"""Settings of Hypothesis: an example has no time limit, since machines may be slow.

Regression: on a busy machine one example of a pure function took more than 200 ms, and so its test failed.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
