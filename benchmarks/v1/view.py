"""A table out of the rows of `v1`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.tables import table

TITLE = "LLaMA-Factory's v1: its strategies beside ours"

NAMES = {"v1 normal": "normal", "v1 dynamic_batching": "dynamic_batching", "odb": "odb"}

HEAD = (
    "data",
    "ranks",
    "samples",
    "batching_strategy",
    "steps",
    "repeated",
    "left out",
    "padding",
    "share of ideal time",
)


def tables(rows: Sequence[Row]) -> str:
    """All rows; `repeated` and `left out` are samples."""
    return table(
        HEAD,
        (
            (
                row.data,
                row.ranks,
                f"{row.settings['samples']:,}",
                NAMES.get(row.method or "", row.method),
                f"{row.figures['steps']:,}",
                f"{row.figures['repeated']:,}",
                f"{row.figures['missing']:,}",
                f"{row.figures['padding']:.1%}",
                f"{row.figures['ideal_share']:.3f}",
            )
            for row in rows
        ),
    )
