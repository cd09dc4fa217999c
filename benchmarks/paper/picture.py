"""The ablations as one figure, out of rows only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.rows import Row

PANELS = {
    "budget": "token budget (padded tokens)",
    "depth": "outstanding depth D (samples)",
    "short share": "share of short samples (CV 0.80)",
    "variation": "CV of the lengths (one mode)",
}
TIME_MODELS = ("A", "B")
STYLES: dict[str, tuple[Any, str]] = {
    "standard": (":", "Standard"),
    "odb": ("--", "paper's protocol"),
    "ours": ("-", "ours"),
}
COLOURS = {"ultrachat": "tab:blue", "llava": "tab:orange", "sharegpt4o": "tab:green", "mm_mix": "tab:red"}


def plot(rows: Sequence[Row]) -> Any:
    """Throughput over Standard's against each thing varied; a line of panels for each model of step time.

    Returns: a matplotlib Figure.
    """
    import matplotlib.pyplot as plt

    found = [row for row in rows if row.what == "ablation"]
    figure, axes = plt.subplots(len(TIME_MODELS), len(PANELS), figsize=(17, 7.5), sharex="col", squeeze=False)
    for line, time_model in zip(axes, TIME_MODELS, strict=True):
        for axis, (panel, label) in zip(line, PANELS.items(), strict=True):
            _panel(axis, [row for row in found if row.settings["panel"] == panel], f"samples_per_s_{time_model}")
            axis.grid(alpha=0.3)
            if panel == "depth":
                axis.set_xscale("log", base=2)
            if time_model == list(TIME_MODELS)[-1]:
                axis.set_xlabel(label)
        line[0].set_ylabel(f"{time_model}: simulated samples/s, Standard = 1")
    _legend(figure, found)
    figure.suptitle("Predicted throughput, by two models of step time; memory and reading are not modelled")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def _panel(axis: Any, rows: Iterable[Row], figure: str) -> None:
    rates: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        point = rates.setdefault(row.data, {}).setdefault(row.method, {})
        point[float(row.settings["x"] or 0.0)] = float(row.figures[figure] or 0.0)
    for data, methods in rates.items():
        given = methods.get("standard", {})
        for method, points in methods.items():
            known = [x for x in sorted(points) if x in given]
            line, _ = STYLES[method]
            axis.plot(known, [points[x] / given[x] for x in known], line, color=COLOURS.get(data), marker=".")


def _legend(figure: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    places = {row.data: f"{row.data} {row.settings['model']}, {row.settings['nodes']} node(s)" for row in rows}
    handles = [Line2D([], [], color=COLOURS.get(data), label=text) for data, text in places.items()]
    handles += [Line2D([], [], color="grey", linestyle=line, label=text) for line, text in STYLES.values()]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False)
