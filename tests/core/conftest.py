"""Hypothesis: no verdict on time, since tests share cores; what the environment's own profile sets (CI) stays."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("core", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")
