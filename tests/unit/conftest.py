"""Properties are held on machines that are slow now and then: how long an example takes is no part of any of them.

The story: while others had the cores, an example of a pure function took more than Hypothesis' 200 ms, once, and a test
failed that passed alone.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
