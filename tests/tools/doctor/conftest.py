"""The tests of the doctor start processes; none may be left."""

from tests.runtime.conftest import _no_process_left  # noqa: F401
