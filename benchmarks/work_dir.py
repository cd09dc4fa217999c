"""The directory in which a benchmark makes its model, data and trainings."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.errors import BenchmarkError

MARKER = ".odb_benchmark"
"""Says that the directory is a benchmark's, so that what an earlier run made there may be deleted."""


def fresh(root: Path) -> Path:
    """`root`, made or emptied, as an absolute path.

    Raises:
        BenchmarkError: it holds something that no benchmark made.
    """
    root = root.resolve()
    if root.exists() and any(root.iterdir()) and not (root / MARKER).exists():
        raise BenchmarkError(f"{root} is not empty and was not made by this benchmark; name another --work-dir.")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / MARKER).touch()
    return root
