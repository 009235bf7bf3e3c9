"""Settings of Hypothesis: no time limit per example, since machines may be slow.

Regression: on a busy machine an example of a pure function took more than 200 ms, and its test failed.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
