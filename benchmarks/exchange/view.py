"""Table and log-log picture of the exchange; reads rows only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rows import Row
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The exchange against the number of ranks"

METHODS = {"odb": "odb-factory", "public": "public package"}
COLORS = {"odb": "tab:blue", "public": "tab:orange"}

HEAD = [
    "ranks",
    "",
    "how",
    "steps a round",
    "bytes sent a round",
    "of these not for steps",
    "bytes received a round",
    "time of its exchanges",
    "time to the first step",
]


def tables(rows: list[Row]) -> str:
    """A line for each world and method; times over those of ours in the smallest world, where it was measured."""
    measured = sorted((row for row in rows if row.figures["round_s"] is not None), key=_order)
    base = measured[0] if measured else None
    caption = "Per rank, of the rank that has most."
    if base is not None:
        caption += f" Times are multiples of {METHODS[base.method]}'s with {base.ranks} ranks."
    return f"{caption}\n\n" + table(HEAD, [_cells(row, base) for row in sorted(rows, key=_order)])


def _order(row: Row) -> tuple[int, int]:
    return row.ranks or 0, list(METHODS).index(row.method)


def _cells(row: Row, base: Row | None) -> list[str]:
    names = ("sent_bytes_per_round", "fixed_bytes_per_round", "received_bytes_per_round")
    return [
        f"{row.ranks:,}",
        METHODS[row.method],
        str(row.settings["how"]),
        _text(row.figures["steps_per_round"], "{:.1f}"),
        *(_text(row.figures[name], "{:,.0f}") for name in names),
        *(_multiple(row, base, name) for name in ("round_s", "first_step_s")),
    ]


def _multiple(row: Row, base: Row | None, name: str) -> str:
    value, unit = row.figures[name], base.figures[name] if base else None
    return f"{float(value) / float(unit):.1f}" if value is not None and unit else ""


def _text(value: object, form: str) -> str:
    return "" if value is None else form.format(value)


def plot(rows: list[Row]) -> Figure:
    """Bytes that a rank sends and receives in a round; and the time of the exchanges where they were real."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = zip(
        figure.subplots(1, 3),
        ("sent_bytes_per_round", "received_bytes_per_round", "round_s"),
        ("bytes sent in a round, per rank", "bytes received in a round, per rank", "exchanges of a round, s"),
        strict=True,
    )
    for axes, name, label in panels:
        for method in METHODS:
            line = sorted((r for r in rows if r.method == method and r.figures[name] is not None), key=_order)
            real = [row for row in line if row.settings["how"] == "processes"]
            for some, style in ((line, "--"), (real, "o-")):
                points = [row.ranks for row in some], [row.figures[name] for row in some]
                axes.plot(*points, style, color=COLORS[method], label=METHODS[method] if style == "o-" else None)
        axes.set(xscale="log", yscale="log", xlabel="ranks (dashed: counted, or by formula)", title=label)
        worlds = sorted({row.ranks for row in rows if row.ranks and row.figures[name] is not None})
        axes.set_xticks(worlds, [f"{world}" for world in worlds])
        axes.set_xticks([], minor=True)
        if name != "round_s":
            axes.set_ylim(100, None)
        axes.title.set_fontsize(10)
    axes.legend(fontsize=8)
    return figure
