"""The tiny model, its data, and settings, are those of the tests of the glue."""

from tests.llamafactory.conftest import demo, one_thread

__all__ = ["demo", "one_thread"]
