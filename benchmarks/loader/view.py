"""Tables and a picture of the loaders; reads rows only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.rows import Row, median_and_spread
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "The loader alone"

METHODS = {"plain": "plain DataLoader", "public": "public package", "odb": "odb-factory"}
COLORS = {"plain": "tab:gray", "public": "tab:orange", "odb": "tab:blue"}

SPEED_HEAD = [
    "samples",
    "ranks x workers",
    "loader",
    "samples/s",
    "to plain",
    "with start, to plain",
    "MB/s",
    "CPU ms a sample",
    "to plain",
    "first batch, s",
    "repeated",
    "missing",
]
MEMORY_HEAD = [
    "samples",
    "ranks x workers",
    "loader",
    "private, MB",
    "shared, MB",
    "of these mapped",
    "in /dev/shm, MB",
    "processes",
]


def tables(rows: list[Row]) -> str:
    """What there is of: speed, memory, waiting."""
    parts = []
    if speed := _of(rows, "speed"):
        parts.append(
            "Alone, nothing behind it: median (least to most) over repetitions; ratios within a repetition.\n\n"
            + table(SPEED_HEAD, _speed_cells(speed))
        )
    if memory := _of(rows, "memory"):
        parts.append(
            "Peak memory of all processes over what there was before the loader, in 10^6 bytes:\n\n"
            + table(MEMORY_HEAD, _memory_cells(memory))
        )
    if waits := _of(rows, "wait"):
        loads = sorted({row.settings["load"] for row in waits})  # type: ignore[type-var]
        head = ["samples", "loader", *(f"trainer {load:g} x" for load in loads)]
        parts.append(
            "Share of the time after the first batch in which the trainer waited (median; least to most). The trainer "
            "takes so many times\nas long for the real tokens as the plain loader needs alone; it pays for padding, "
            "too:\n\n" + table(head, _wait_cells(waits, loads))
        )
    return "\n\n".join(parts)


def _speed_cells(rows: list[Row]) -> Iterable[list[str]]:
    plain = {_key(row): row for row in rows if row.method == "plain"}
    for place, method, group in _groups(rows):
        yield [
            *place,
            METHODS[method],
            _spread([_figure(row, "samples_per_s") for row in group], "{:,.0f}"),
            *(_ratios(group, plain, name) for name in ("samples_per_s", "epoch_samples_per_s")),
            _spread([_figure(row, "mb_per_s") for row in group], "{:,.0f}", spread=False),
            _spread([_figure(row, "cpu_ms_per_sample") for row in group], "{:.2f}"),
            _ratios(group, plain, "cpu_ms_per_sample"),
            _spread([_figure(row, "first_batch_s") for row in group], "{:.2f}"),
            *(f"{max(_figure(row, name) for row in group):.0f}" for name in ("repeated", "missing")),
        ]


def _memory_cells(rows: list[Row]) -> Iterable[list[str]]:
    names = ("private_mb", "shared_mb", "shared_mapped_mb", "shm_files_mb", "processes")
    for place, method, group in _groups(rows):
        figures = (_spread([_figure(row, name) for row in group], "{:,.0f}") for name in names)
        yield [*place, METHODS[method], *figures]


def _wait_cells(rows: list[Row], loads: Sequence[object]) -> Iterable[list[str]]:
    for place, method, group in _groups(rows):
        at = [[_figure(row, "wait_share") for row in group if row.settings["load"] == load] for load in loads]
        yield [place[0], METHODS[method], *(_spread(values, "{:.1%}") for values in at)]


def plot(rows: list[Row]) -> Figure:
    """Left: samples/s and CPU time over the plain loader's; right: share of waiting against the trainer's time."""
    from matplotlib.figure import Figure

    waits = _of(rows, "wait")
    kinds = list(dict.fromkeys(row.data for row in waits))
    figure = Figure(figsize=(11, 3.2 * max(2, len(kinds))), layout="constrained")
    grid = figure.add_gridspec(2 * max(1, len(kinds)), 2, width_ratios=(1.6, 1))
    half = max(1, len(kinds))
    for axes, name, label in (
        (figure.add_subplot(grid[:half, 0]), "samples_per_s", "samples/s"),
        (figure.add_subplot(grid[half:, 0]), "cpu_ms_per_sample", "CPU time a sample"),
    ):
        _bars(axes, _of(rows, "speed"), name)
        axes.set_title(f"{label}, over the plain DataLoader's", fontsize=10)
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(grid[2 * number : 2 * number + 2, 1])
        _wait_lines(axes, [row for row in waits if row.data == kind])
        axes.set_title(f"trainer waits for {kind}", fontsize=10)
    return figure


def _bars(axes: Axes, rows: list[Row], name: str) -> None:
    plain = {_key(row): row for row in rows if row.method == "plain"}
    groups = _groups(rows)
    places = list(dict.fromkeys(place for place, _, _ in groups))
    others = [method for method in METHODS if method != "plain" and any(method == m for _, m, _ in groups)]
    for place, method, group in groups:
        found = [_figure(row, name) / _figure(plain[_key(row)], name) for row in group if _key(row) in plain]
        if method == "plain" or not found:
            continue
        middle, least, most = median_and_spread(found)
        at = places.index(place) + 0.38 * (others.index(method) - (len(others) - 1) / 2)
        error = [[middle - least], [most - middle]]
        axes.bar(at, middle, 0.36, yerr=error, capsize=2, color=COLORS[method])
    axes.axhline(1, color=COLORS["plain"], linewidth=1)
    axes.set_xticks(range(len(places)), [f"{data}\n{place}" for data, place in places], fontsize=7)
    for method in others:
        axes.bar(0, 0, color=COLORS[method], label=METHODS[method])
    if others:
        axes.legend(fontsize=8)


def _wait_lines(axes: Axes, rows: list[Row]) -> None:
    loads = sorted({float(row.settings["load"]) for row in rows})  # type: ignore[arg-type]
    for _, method, group in _groups(rows):
        found = [[_figure(row, "wait_share") for row in group if row.settings["load"] == load] for load in loads]
        at = [(load, *median_and_spread(values)) for load, values in zip(loads, found, strict=True) if values]
        x, middle, least, most = zip(*at, strict=True)
        axes.plot(x, middle, "o-", color=COLORS[method], label=METHODS[method])
        axes.fill_between(x, least, most, color=COLORS[method], alpha=0.2)
    axes.set(xscale="log", ylim=(0, 1), xlabel="trainer's time over the plain loader's", ylabel="share of time")
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xticks([], minor=True)
    axes.legend(fontsize=8)


def _of(rows: Iterable[Row], what: str) -> list[Row]:
    return [row for row in rows if row.what == what]


def _groups(rows: list[Row]) -> list[tuple[tuple[str, str], str, list[Row]]]:
    """((data, ranks x workers), method, its rows) in the order of kinds and places, methods as in METHODS."""
    places = dict.fromkeys(_place(row) for row in rows)
    found = [(place, m, [r for r in rows if _place(r) == place and r.method == m]) for place in places for m in METHODS]
    return [entry for entry in found if entry[2]]


def _place(row: Row) -> tuple[str, str]:
    return row.data, f"{row.ranks} x {row.settings['workers']}"


def _key(row: Row) -> tuple[object, ...]:
    """What two rows have in common that may be compared."""
    return *_place(row), row.settings.get("repetition"), row.settings.get("load")


def _figure(row: Row, name: str) -> float:
    return float(row.figures[name])  # type: ignore[arg-type]


def _ratios(group: list[Row], plain: dict[tuple[object, ...], Row], name: str) -> str:
    found = [_figure(row, name) / _figure(plain[_key(row)], name) for row in group if _key(row) in plain]
    return _spread(found, "{:.2f}") if found and group[0].method != "plain" else ""


def _spread(values: list[float], form: str, *, spread: bool = True) -> str:
    if not values:
        return ""
    middle, least, most = map(form.format, median_and_spread(values))
    return f"{middle} ({least} to {most})" if spread and len(values) > 1 else middle
