"""Tables and a picture out of the rows of `balance`."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.rows import Row
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Balance: lengths replayed through every way of batching"

ORDER = ("standard", "sorted", "packing", "gmt", "bmt", "paper", "public", "odb static", "odb padded", "odb")
NAMES = {
    "standard": "Standard",
    "sorted": "Sorted",
    "packing": "packing (bound)",
    "gmt": "GMT (all lengths known)",
    "bmt": "BMT (lengths known)",
    "paper": "the paper's protocol",
    "public": "public package",
    "odb static": "ODB, static indices",
    "odb padded": "ODB, by padded tokens alone",
    "odb": "ODB",
}


def tables(rows: Sequence[Row]) -> str:
    """One table of all methods for each data, at one world and depth, ours against depth and ranks, and with attention.

    Where attention takes no time in any row, or always the same, there is no table of that.
    """
    rows, *with_attention = _by_square(rows)
    parts = []
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        ranks, depth = _shown(own)
        chosen = [row for row in own if row.ranks == ranks and row.depth in (depth, None)]
        parts.append(f"### {data}\n\n{_about(chosen, ranks, depth)}\n\n{_methods(chosen)}")
    parts.append(_by_world(rows))
    parts += map(_by_attention, with_attention)
    return "\n\n".join(part for part in parts if part)


def _square(row: Row) -> float:
    return float(row.settings.get("square") or 0)


def _by_square(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in which attention takes the same time, least first."""
    return [[row for row in rows if _square(row) == time] for time in sorted(set(map(_square, rows)))]


def _by_attention(rows: Sequence[Row]) -> str:
    """Share of ideal time of every method, where attention takes the same time in all rows."""
    parts = [(data, [row for row in rows if row.data == data]) for data in dict.fromkeys(row.data for row in rows)]
    shown = [(data, own, *_shown(own)) for data, own in parts]
    lines = [
        [NAMES.get(method, method)]
        + [
            _cell(row for row in own if row.method == method and row.ranks == ranks and row.depth in (depth, None))
            for _, own, ranks, depth in shown
        ]
        for method in sorted({row.method for row in rows}, key=_place)
    ]
    _, _, ranks, depth = shown[0]
    taken = {row.settings.get("attention_length") for row in rows if row.method == "odb"}
    ours = "".join(f", ODB takes it for {length:,}" for length in taken if isinstance(length, int))
    return (
        f"### Share of ideal time where attention takes {_square(rows[0]):.3g} per (token)²\n\n{ranks} ranks, depth "
        f"{depth}; attention takes as long as all else in rows of {round(1 / _square(rows[0])):,} tokens{ours}:"
        f"\n\n{table(['method', *(data for data, _ in parts)], lines)}"
    )


def shown_world(worlds: Collection[int]) -> int:
    """Ranks of the tables of methods: 8 where there are, else the most below; the fewest where all are more."""
    return max((world for world in worlds if world <= 8), default=min(worlds))


def _shown(rows: Sequence[Row]) -> tuple[int | None, int | None]:
    """Ranks and depth of the table of methods: `shown_world`, and the largest depth."""
    ranks = shown_world({row.ranks or 0 for row in rows})
    depths = [row.depth for row in rows if row.ranks == ranks and row.depth is not None]
    return ranks, max(depths, default=None)


def _about(rows: Sequence[Row], ranks: int | None, depth: int | None) -> str:
    first = rows[0]
    seeds = len({row.seed for row in rows})
    words = [f"{first.settings['samples']:,} samples", f"{ranks} ranks"]
    if depth is not None:
        words.append(f"depth {depth}")
    budgets = sorted({row.budget for row in rows if row.budget is not None})
    words.append(f"budget {', '.join(f'{budget:,}' for budget in budgets)}")
    words.append(f"median of {seeds} seeds" if seeds > 1 else "one seed")
    model = [f"{name} {first.settings[name]:g}" for name in ("constant", "square") if first.settings.get(name)]
    return ", ".join(words + model) + ":"


HEAD = (
    "method",
    "padding",
    "balance",
    "samples/step",
    "steps",
    "fillers",
    "share of ideal time",
    "deferral / bound",
    "length by place",
    "least and most tenth",
)


def _methods(rows: Sequence[Row]) -> str:
    lines = []
    for method in sorted({row.method for row in rows}, key=_place):
        of_method = [row for row in rows if row.method == method]
        for batch_size in sorted({row.settings.get("batch_size") or 0 for row in of_method}):
            for budget in sorted({row.budget or 0 for row in of_method}):
                same = [
                    row
                    for row in of_method
                    if (row.settings.get("batch_size") or 0) == batch_size and (row.budget or 0) == budget
                ]
                if same:
                    lines.append(_line(NAMES.get(method, method), batch_size, same))
    return table(HEAD, lines)


def _line(name: str, batch_size: int, rows: Sequence[Row]) -> list[str]:
    if batch_size:
        name += f", batch {batch_size}" + ("" if rows[0].settings.get("best") else " (beyond the budget or below)")
    return [
        name,
        f"{_median(rows, 'padding'):.1%}",
        f"{_median(rows, 'balance'):.3f}",
        f"{_median(rows, 'samples_per_step'):.1f}",
        f"{_median(rows, 'steps'):,.0f}",
        f"{_median(rows, 'fillers'):,.0f}",
        f"{_median(rows, 'ideal_share'):.3f}",
        _deferral(rows),
        f"{_median(rows, 'order_correlation'):+.3f}",
        f"{_median(rows, 'part_least'):.2f} to {_median(rows, 'part_most'):.2f}",
    ]


def _deferral(rows: Sequence[Row]) -> str:
    if "deferral" not in rows[0].figures:
        return ""
    return f"{max(_number(row, 'deferral') for row in rows):.0f} / {_number(rows[0], 'deferral_bound'):.0f}"


def _by_world(rows: Sequence[Row]) -> str:
    """Share of ideal time of ours against ranks and depth, beside GMT."""
    ours = [row for row in rows if row.method == "odb"]
    if not ours:
        return ""
    head = ["data", "ranks", "samples", "GMT"]
    depths = sorted({row.depth or 0 for row in ours})
    head += [f"ODB, depth {depth}" for depth in depths] + ["CPU of the core, ms a sample"]
    lines = []
    for data, ranks in dict.fromkeys((row.data, row.ranks) for row in ours):
        same = [row for row in rows if (row.data, row.ranks) == (data, ranks)]
        mine = [row for row in same if row.method == "odb"]
        cells = [data, ranks, f"{mine[0].settings['samples']:,}", _cell(r for r in same if r.method == "gmt")]
        cells += [_cell(row for row in mine if row.depth == depth) for depth in depths]
        lines.append([*cells, f"{_median(mine, 'cpu_ms_per_sample'):.3f}"])
    return "### Share of ideal time against ranks and depth\n\n" + table(head, lines)


def _cell(rows: Iterable[Row]) -> str:
    """Median share of ideal time, with its spread where there are several."""
    values = [_number(row, "ideal_share") for row in rows]
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _place(method: str) -> tuple[int, str]:
    return (ORDER.index(method) if method in ORDER else len(ORDER), method)


def _number(row: Row, name: str) -> float:
    value = row.figures[name]
    assert isinstance(value, int | float)
    return value


def _median(rows: Iterable[Row], name: str) -> float:
    return statistics.median(_number(row, name) for row in rows)


def plot(rows: Sequence[Row]) -> Figure:
    """Left: share of ideal time by method and data. Right: ours against depth, a line for each data and world."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = _by_square(rows)[0]
    _bars(left, rows)
    _lines(right, rows)
    return figure


def _bars(axes: object, rows: Sequence[Row]) -> None:
    data = list(dict.fromkeys(row.data for row in rows))
    methods = sorted({row.method for row in rows}, key=_place)
    width = 0.85 / len(methods)
    for place, method in enumerate(methods):
        heights = []
        for name in data:
            own = [row for row in rows if row.data == name]
            ranks, depth = _shown(own)
            same = [r for r in own if r.method == method and r.ranks == ranks and r.depth in (depth, None)]
            same = [r for r in same if r.settings.get("best", True)]
            heights.append(_median(same, "ideal_share") if same else 0.0)
        at = [i + (place - len(methods) / 2 + 0.5) * width for i in range(len(data))]
        axes.bar(at, heights, width, label=NAMES.get(method, method))  # type: ignore[attr-defined]
    axes.set_xticks(range(len(data)), data)  # type: ignore[attr-defined]
    axes.set_ylim(0, 1)  # type: ignore[attr-defined]
    ranks, depth = _shown(rows)
    axes.set_title(f"{ranks} ranks, depth {depth}")  # type: ignore[attr-defined]
    axes.set_ylabel("share of ideal time")  # type: ignore[attr-defined]
    axes.legend(fontsize=8, ncols=3, loc="lower center")  # type: ignore[attr-defined]


def _lines(axes: object, rows: Sequence[Row]) -> None:
    ours = [row for row in rows if row.method == "odb" and row.depth is not None]
    worlds = sorted({row.ranks or 0 for row in ours})
    for number, data in enumerate(dict.fromkeys(row.data for row in ours)):
        for place, world in enumerate(worlds):
            same = [row for row in ours if row.data == data and row.ranks == world]
            depths = sorted({row.depth or 0 for row in same})
            shares = [_median([r for r in same if r.depth == depth], "ideal_share") for depth in depths]
            label = f"{data}, {world} ranks"
            style = ("-", "--", ":", "-.")[place % 4]
            axes.plot(depths, shares, style, color=f"C{number}", marker="o", label=label)  # type: ignore[attr-defined]
    axes.set_xscale("log", base=2)  # type: ignore[attr-defined]
    axes.set_xlabel("depth (samples a rank holds)")  # type: ignore[attr-defined]
    axes.set_title("ODB against depth and ranks")  # type: ignore[attr-defined]
    if ours:
        axes.legend(fontsize=7, ncols=2)  # type: ignore[attr-defined]
