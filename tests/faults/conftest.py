"""Every test of this folder must clean up after itself, as those of the runtime."""

from __future__ import annotations

from tests.runtime.conftest import _no_process_left  # noqa: F401  (a fixture, used by every test)
