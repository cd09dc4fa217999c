"""Table and picture of memory under a bound; reads rows only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rows import Row
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Memory under a bound on the window"

HEAD = [
    "window_bytes",
    "peak over start",
    "bound",
    "micro-batch, at most",
    "padding",
    "steps",
    "short windows",
    "within the bound",
]


def tables(rows: list[Row]) -> str:
    """A line for each bound; sizes in MiB."""
    first = rows[0]
    caption = (
        f"{first.settings['samples']} samples with {first.data}, depth {first.depth}, {first.settings['workers']} "
        "workers; sizes in MiB:"
    )
    return f"{caption}\n\n" + table(HEAD, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    limit, figures = row.settings["window_mib"], row.figures
    return [
        "none" if limit is None else f"{limit}",
        f"{_number(row, 'peak_mib'):.0f}",
        "none" if limit is None else f"{_bound(row):.0f}",
        f"{_number(row, 'largest_batch_mib'):.0f}",
        f"{_number(row, 'padding'):.1%}",
        f"{figures['steps']}",
        f"{figures['short_windows']} of {figures['rounds']}",
        "-" if limit is None else "yes" if figures["within"] else "**no**",
    ]


def plot(rows: list[Row]) -> Figure:
    """Peak and bound, and the padding that the bound costs, against window_bytes."""
    from matplotlib.figure import Figure

    bounded = sorted((row for row in rows if row.settings["window_mib"] is not None), key=_window)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    windows = [_window(row) for row in bounded]
    left.plot(windows, [_bound(row) for row in bounded], "k.--", label="window + stated constant")
    left.plot(windows, [_number(row, "peak_mib") for row in bounded], "o-", label="peak of the collate process")
    right.plot(windows, [_number(row, "padding") for row in bounded], "o-", label="with the bound")
    for row in rows:
        if row.settings["window_mib"] is None:
            left.axhline(_number(row, "peak_mib"), color="tab:gray", label="peak without a bound")
            right.axhline(_number(row, "padding"), color="tab:gray", label="without a bound")
    left.set(xlabel="window_bytes, MiB", ylabel="MiB", ylim=(0, None))
    right.set(xlabel="window_bytes, MiB", ylabel="padding", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


def _window(row: Row) -> float:
    return float(row.settings["window_mib"])  # type: ignore[arg-type]


def _number(row: Row, name: str) -> float:
    return float(row.figures[name])  # type: ignore[arg-type]


def _bound(row: Row) -> float:
    return _window(row) + _number(row, "constant_mib")
