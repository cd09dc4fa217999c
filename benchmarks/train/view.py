"""Tables and the picture of `train`, out of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rows import Row, median_and_spread
from benchmarks.tables import table

TITLE = "Whole trainings on CPUs, every way of batching"

NAMES = {
    "standard": "Standard",
    "sorted": "Sorted",
    "packing": "packing",
    "gmt": "GMT",
    "bmt": "BMT",
    "public": "public package",
    "odb": "odb-factory",
}

SPEED = ("method", "samples/s", "x Standard", "real tokens/s", "padding", "ideal time", "data wait", "others")
"""`others`: the largest share of the machine that other programs took during a run."""
MORE = (
    "method",
    "steps",
    "updates",
    "fillers",
    "unique",
    "repeated",
    "lost",
    "loss after",
    "first step, s",
    "lengths, s",
    "CPU s",
    "peak GiB",
)

PANELS = {"samples_per_s": "emitted samples / s", "padding": "padding", "ideal_share": "share of ideal time"}


def tables(rows: list[Row]) -> str:
    """Speed, and what else came out, for each model; medians of the repetitions, in brackets the least and the most."""
    return "\n\n".join(_tables(part) for part in _by_model(rows))


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of models that differ in their attention head, in the order of their first rows."""
    heads = dict.fromkeys(row.settings.get("head") for row in rows)
    return [[row for row in rows if row.settings.get("head") == head] for head in heads]


def _tables(rows: list[Row]) -> str:
    failed = [row for row in rows if "failed" in row.figures]
    rows = [row for row in rows if "failed" not in row.figures]
    if not rows:
        return "All runs failed."
    methods = _methods(rows)
    speed = [_speed_cells(method, rows) for method in methods]
    more = [_more_cells(method, rows) for method in methods]
    parts = [_caption(rows[0], rows), table(SPEED, speed), table(MORE, more)]
    parts += [
        f"{NAMES.get(row.method, row.method)} failed in repetition {_repetition(row)}: {row.figures['failed']}"
        for row in failed
    ]
    return "\n\n".join(parts)


def ratios(rows: Sequence[Row], method: str) -> list[float]:
    """Samples/s of `method` over those of Standard in the same repetition; empty without Standard."""
    base = {_repetition(row): _figure(row, "samples_per_s") for row in rows if row.method == "standard"}
    return [
        _figure(row, "samples_per_s") / base[_repetition(row)]
        for row in rows
        if row.method == method and _repetition(row) in base
    ]


def plot(rows: list[Row]) -> Any:
    """Samples/s, padding and share of ideal time of the first model; lines go from the least to the most repetition."""
    from matplotlib.figure import Figure

    rows = [row for row in _by_model(rows)[0] if "failed" not in row.figures]
    methods = _methods(rows)
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True)
    for number, (axes, (name, text)) in enumerate(panels):
        spreads = [median_and_spread(_values(rows, method, name)) for method in methods]
        middle = [value for value, _, _ in spreads]
        reach = [[value - least for value, least, _ in spreads], [most - value for value, _, most in spreads]]
        colours = ["tab:orange" if method == "odb" else "tab:blue" for method in methods]
        axes.barh([NAMES.get(method, method) for method in methods], middle, xerr=reach, color=colours, capsize=3)
        if number == 0:  # the axis is shared
            axes.invert_yaxis()
        axes.set_title(text)
    return figure


def _caption(row: Row, rows: Sequence[Row]) -> str:
    settings = row.settings
    count = max(map(_repetition, rows))
    return (
        f"{settings['conversations']} samples ({row.data}), mean {settings['lengths_mean']} tokens, CV "
        f"{settings['lengths_cv']}, {settings['lengths_at_cutoff']:.0%} at the cutoff {settings['cutoff']}; "
        f"{row.ranks} ranks; budget {row.budget} padded tokens = {settings['batch_size']} x cutoff; Qwen3 of "
        f"{settings['layers']} layers, width {settings['hidden']}, one head of {settings['head']}, vocabulary "
        f"{settings['vocabulary']}; {count} repetition(s): medians, in brackets least and most. Loss before training: "
        f"{settings['untrained_loss']}."
    )


def _speed_cells(method: str, rows: Sequence[Row]) -> list[str]:
    against = ratios(rows, method)
    return [
        NAMES.get(method, method),
        _cell(_values(rows, method, "samples_per_s"), "{:.2f}".format),
        _cell(against, "{:.2f}".format),
        _cell(_values(rows, method, "tokens_per_s"), "{:,.0f}".format),
        _cell(_values(rows, method, "padding"), "{:.1%}".format),
        _cell(_values(rows, method, "ideal_share"), "{:.3f}".format),
        _cell(_values(rows, method, "data_wait"), "{:.1%}".format),
        f"{max(_values(rows, method, 'others_share')):.0%}",
    ]


def _more_cells(method: str, rows: Sequence[Row]) -> list[str]:
    counts = ("steps", "updates", "fillers", "unique", "repeated", "lost")
    return [
        NAMES.get(method, method),
        *(_cell(_values(rows, method, name), "{:.0f}".format) for name in counts),
        _cell(_values(rows, method, "eval_loss"), "{:.4f}".format),
        _cell(_values(rows, method, "first_step_s"), "{:.1f}".format),
        _cell(_values(rows, method, "length_cache_s"), "{:.1f}".format),
        _cell(_values(rows, method, "cpu_s"), "{:.0f}".format),
        _cell(_values(rows, method, "peak_rss_gib"), "{:.2f}".format),
    ]


def _cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Median, and the spread where there is any to be seen; blank without values."""
    if not values:
        return ""
    least, most = shown(min(values)), shown(max(values))
    return shown(statistics.median(values)) + (f" ({least}-{most})" if least != most else "")


def _methods(rows: Sequence[Row]) -> list[str]:
    found = dict.fromkeys(row.method for row in rows)
    return [method for method in NAMES if method in found] + [method for method in found if method not in NAMES]


def _values(rows: Sequence[Row], method: str, name: str) -> list[float]:
    return [_figure(row, name) for row in rows if row.method == method and name in row.figures]


def _figure(row: Row, name: str) -> float:
    return float(row.figures[name] or 0.0)


def _repetition(row: Row) -> int:
    return int(row.settings.get("repetition") or 1)
