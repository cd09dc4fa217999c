"""Tables of `plan`: runs beside their plans, and how far plans from a part of the rows are off."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.tables import table

TITLE = "Plan: what is predicted, and what is run"

HEAD = ["data", "ranks", "batching", "steps", "samples a step", "padding", "padded tokens", "share of ideal time"]
PART_HEAD = ["data", "ranks", "batching", "rows read", "steps", "samples a step", "padding", "share of ideal time"]
FORMATS = {
    "steps": "{:,}",
    "samples_per_step": "{:.3f}",
    "padding": "{:.4%}",
    "padded_tokens": "{:,}",
    "ideal_share": "{:.4f}",
}
NAMES = {"standard": "Standard", "odb": "ODB"}


def tables(rows: Sequence[Row]) -> str:
    """Both tables, where there are rows for them."""
    parts = []
    epochs = [row for row in rows if row.what == "epoch"]
    if epochs:
        parts.append(f"One epoch, run / planned, all rows read:\n\n{table(HEAD, map(_epoch, epochs))}")
    partial = [row for row in rows if row.what == "part"]
    if partial:
        parts.append(
            f"Plans from a part of the rows, {partial[0].settings['draws']} draws, against the plan from all rows: "
            "mean error, and the largest\n(relative; padding in percentage points):\n\n"
            f"{table(PART_HEAD, map(_part, partial))}"
        )
    return "\n\n".join(parts)


def _epoch(row: Row) -> list[str]:
    def pair(name: str, shape: str) -> str:
        values = [row.figures[key] for key in (name, f"planned_{name}")]
        return " / ".join("-" if value is None else shape.format(value) for value in values)

    return [*_place(row), *(pair(name, shape) for name, shape in FORMATS.items())]


def _part(row: Row) -> list[str]:
    def cell(name: str) -> str:
        mean, largest = (100 * float(row.figures[f"{name}_{which}_error"]) for which in ("mean", "largest"))  # type: ignore[arg-type]
        return f"{mean:.1f}, at most {largest:.1f}{' points' if name == 'padding' else ' %'}"

    names = [name for name in FORMATS if name != "padded_tokens"]
    return [*_place(row), f"{row.settings['rows_read']:,} of {row.settings['rows']:,}", *map(cell, names)]


def _place(row: Row) -> list[str]:
    return [row.data, str(row.ranks), NAMES.get(row.method, row.method)]
