"""Tables of the paper's cells: as published, measured here, predicted; out of rows only."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.paper.picture import plot
from benchmarks.paper.text import NAMES, hardware_of, number, place, short, span
from benchmarks.paper.view_model import (
    ablations,
    assumptions,
    attention,
    fits,
    open_by_standard,
    quality,
    records,
    sensitivity,
)
from benchmarks.rows import Row, Value
from benchmarks.tables import table

TITLE = "The paper's tables: published, measured here, predicted"

__all__ = ["TITLE", "plot", "tables"]

TABLES = {
    "single node": "Single node",
    "two nodes": "Two nodes",
    "MM-Mix": "MM-Mix, two nodes",
    "oracles": "Against the offline oracles GMT and BMT",
    "Sorted": "Sorted",
    "public records": "Example records of the public package (MM-Mix)",
}

INTRO = """Cells that are neither published nor measured are blank. *predicted* is the paper's protocol, *ours* this
project's, both simulated with constants that were fitted to Standard's cells alone: A fits what a step, a token and a
square (attention) cost, B only the first two, with attention as the model's shape has it. B was added after A's
constant for attention had come out far too large; only A is a test that was set before its results were known. The
lengths are made: their variation is the paper's, the rest is assumed. How far the predictions hang on that is in the
tables of sensitivity: read a prediction with its range there."""


def tables(rows: Sequence[Row]) -> str:
    """All tables that the rows have something for."""
    parts = [
        *_cell_tables(rows),
        quality(rows),
        records(rows),
        assumptions(rows),
        fits(rows),
        sensitivity(rows),
        open_by_standard(rows),
        attention(rows),
        ablations(rows),
        _elsewhere(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _cell_tables(rows: Sequence[Row]) -> list[str]:
    predictions = [row for row in rows if row.what == "prediction"]
    if not predictions:
        return []
    models = list(dict.fromkeys(str(row.settings["time_model"]) for row in predictions))
    by_cell: dict[tuple[Value, ...], list[Row]] = defaultdict(list)
    for row in predictions:
        key = (row.data, row.method, *(value for name, value in row.settings.items() if name != "time_model"))
        by_cell[key].append(row)
    measured = Measured(rows)
    head = ["data", "setting", "figure", "paper", "measured here"]
    head += [text for name in models for text in (f"predicted, {name}", "error")]
    head.append(f"ours, {' / '.join(models)}")
    parts = [INTRO]
    for name, title in TABLES.items():
        lines = [_cell(same, measured) for same in by_cell.values() if same[0].settings["table"] == name]
        if lines:
            parts.append(f"### {title}\n\n{table(head, lines)}")
    summaries = [_summary(name, [r for r in predictions if r.settings["time_model"] == name]) for name in models]
    only_once = [row for row in predictions if row.settings["time_model"] == models[0]]
    return [*parts, _contradictions(only_once), *summaries]


def _cell(same: Sequence[Row], measured: Measured) -> list[str]:
    """A line: the rows of one cell, one for each model of step time."""
    row = same[0]
    settings = row.settings
    what = {"standard": "Standard", "odb": "ODB", "sorted": "Sorted"}[row.method]
    if settings["quantity"] == "speedup":
        what += " / Standard"
    elif settings["quantity"] == "ratio":
        what += f" / {str(settings['against']).upper()}"
    else:
        what += ", samples/s"
    if settings["note"]:
        what += f" ({settings['note']})"
    where = place(row) + (f", {settings['tuning']}" if settings["tuning"] else "")
    predicted: list[str] = []
    for one in same:
        is_predicted = one.settings["role"] == "predicted"
        values = span(one.figures["simulated_low"], one.figures["simulated_high"]) if is_predicted else ""
        predicted += [values, _error(one)]
    ours = [span(one.figures["ours_low"], one.figures["ours_high"]) for one in same if row.method == "odb"]
    return [
        NAMES.get(row.data, row.data),
        where,
        what,
        span(row.figures["paper_low"], row.figures["paper_high"]),
        measured.cell(row),
        *predicted,
        " / ".join(ours),
    ]


def _error(row: Row) -> str:
    if row.settings["role"] == "fitted":
        left = number(row.figures["error"])
        return "fitted" if abs(left) < 5e-4 else f"fitted, {left:+.1%} left"
    if "inside" in row.figures:
        inside, of = row.figures["inside"], row.figures["of"]
        if of == 1:
            return "inside" if inside else "outside"
        return f"{inside} of {of} inside"
    error = row.figures.get("error")
    return "" if error is None else f"{number(error):+.1%}"


def _summary(time_model: str, predictions: Iterable[Row]) -> str:
    keys = ("model", "nodes", "source")
    # a rate and the speed-up over a fitted rate have the same error: once for each setting and method
    found = {
        (row.data, row.method, *(row.settings[key] for key in keys)): number(row.figures["error"])
        for row in predictions
        if row.settings["role"] == "predicted" and row.figures.get("error") is not None
    }
    if not found:
        return ""
    sizes = sorted(map(abs, found.values()))
    return (
        f"{time_model}: {len(found)} published speed-ups were predicted: the median of the absolute errors is "
        f"{statistics.median(sizes):.0%}, the least {sizes[0]:.0%}, the worst {sizes[-1]:.0%}; "
        f"{sum(error > 0 for error in found.values())} are too high."
    )


def _contradictions(predictions: Sequence[Row]) -> str:
    """Published numbers outside of a published range that should hold them."""
    found = []
    for wide in predictions:
        if wide.settings["quantity"] != "speedup" or "inside" not in wide.figures:
            continue
        low, high = number(wide.figures["paper_low"]), number(wide.figures["paper_high"])
        for row in predictions:
            value = row.figures["paper_low"]
            if _in_range_of(row, wide) and value is not None and not low <= number(value) <= high:
                found.append(f"{NAMES[row.data]}, {place(row)}: {short(number(value))}, not in {span(low, high)}")
    if not found:
        return ""
    return (
        "The published numbers do not all agree with each other, so that these ranges may be of something else than "
        f"the table they stand in says ({'; '.join(found)})."
    )


def _in_range_of(row: Row, wide: Row) -> bool:
    """Whether a number of the paper is of a setting that a range covers."""
    same = all(row.settings[key] == wide.settings[key] for key in ("quantity", "nodes", "source"))
    covered = row.data in str(wide.settings["datasets"]) and str(row.settings["model"]) in str(wide.settings["model"])
    return same and covered and "error" in row.figures and row.method == wide.method


class Measured:
    """What `paper --run` measured, by cell."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rates: dict[tuple[Value, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row.what == "cell":
                key = (row.data, row.settings["model"], row.settings["nodes"], row.settings["tuning"], row.method)
                self._rates[key][hardware_of(row)].append(number(row.figures["samples_per_s"]))

    def cell(self, row: Row) -> str:
        """Of a table's row: the median of each machine's runs; a speed-up only of runs on the same machine."""
        settings = row.settings
        if settings["source"] != "paper" or "/" in str(settings["model"]) or settings["quantity"] == "ratio":
            return ""
        key = (row.data, settings["model"], settings["nodes"], settings["tuning"] or "full")
        found = []
        for machine, rates in self._rates.get((*key, row.method), {}).items():
            value = statistics.median(rates)
            if settings["quantity"] == "speedup":
                others = self._rates.get((*key, settings["against"]), {}).get(machine)
                if not others:
                    continue
                value /= statistics.median(others)
            found.append(f"{short(value)} ({machine})")
        return "; ".join(found)


def _elsewhere(rows: Sequence[Row]) -> str:
    """Everything that was measured, whether or not the paper has a cell for it."""
    lines = [
        [
            NAMES.get(row.data, row.data),
            row.method,
            f"{row.settings['model']}, {row.settings['tuning']}",
            row.ranks,
            row.figures["emitted"],
            f"{number(row.figures['train_s']):.1f}",
            short(number(row.figures["samples_per_s"])),
            hardware_of(row),
        ]
        for row in rows
        if row.what == "cell"
    ]
    if not lines:
        return ""
    head = ("data", "method", "model", "ranks", "emitted samples", "seconds", "samples/s", "hardware")
    return f"### Measured by `paper --run`\n\n{table(head, lines)}"
