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
STYLES = {"standard": (":", "Standard"), "odb": ("--", "paper's protocol"), "ours": ("-", "ours")}
COLOURS = {"ultrachat": "tab:blue", "llava": "tab:orange", "sharegpt4o": "tab:green", "mm_mix": "tab:red"}


def plot(rows: Sequence[Row]) -> Any:
    """Throughput over Standard's against each thing varied; of MM-Mix' shapes also Standard's own throughput.

    Returns: a matplotlib Figure.
    """
    import matplotlib.pyplot as plt

    found = [row for row in rows if row.what == "ablation"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    for axis, (panel, label) in zip(axes.flat, PANELS.items(), strict=True):
        _panel(axis, [row for row in found if row.settings["panel"] == panel])
        axis.set_xlabel(label)
        axis.set_ylabel("simulated samples/s, Standard = 1")
        axis.grid(alpha=0.3)
        if panel == "depth":
            axis.set_xscale("log", base=2)
    _legend(figure, found)
    figure.suptitle("Predicted throughput; memory and reading are not modelled", y=1.0)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _panel(axis: Any, rows: Iterable[Row]) -> None:
    rates: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        point = rates.setdefault(row.data, {}).setdefault(row.method, {})
        point[float(row.settings["x"] or 0.0)] = float(row.figures["samples_per_s"] or 0.0)
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
