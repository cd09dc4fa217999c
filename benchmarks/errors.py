"""What a benchmark raises when it cannot go on."""

from __future__ import annotations


class BenchmarkError(Exception):
    """One sentence for the person who started the benchmark, with the remedy where there is one."""
