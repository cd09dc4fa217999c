"""Errors of the runtime. Each message is one sentence on what is wrong and where, and what to do."""

from __future__ import annotations


class OdbError(RuntimeError):
    """Base of all errors raised while a loader runs."""


class SampleError(OdbError):
    """A sample could not be read or observed; the message holds index, cause and the worker's traceback."""


class CollateError(OdbError):
    """The collate process failed or died."""


class ExchangeError(OdbError):
    """The exchange with the other ranks failed: one of them died, stalled or was started differently."""
