"""Tables and the picture of `gpu`, out of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.rows import Row
from benchmarks.tables import table

TITLE = "One GPU: every way of batching on a model of Qwen3-VL-2B's shape"

NAMES = {"standard": "Standard", "odb": "ODB", "packing": "packing, padding-free", "public": "public package"}

HEAD = (
    "",
    "samples/s",
    "to Standard",
    "real tokens/s",
    "padded tokens/s",
    "padding",
    "MFU",
    "peak GiB, allocated / reserved",
    "data wait",
    "first batch, s",
    "steps",
    "seconds",
)


def tables(rows: Sequence[Row]) -> str:
    """A table for each profile and kind."""
    return "\n\n".join(_cell(data, what, found) for (data, what), found in _cells(rows).items())


def _cells(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.data, row.what), []).append(row)
    return found


def _cell(data: str, what: str, rows: list[Row]) -> str:
    measured = sorted((row for row in rows if not row.settings["trial"]), key=_place)
    settings = rows[0].settings
    words = [
        f"{settings['samples']:,} samples",
        "a tiny model, which says nothing about a real one" if settings["tiny"] else "the full model",
        str(settings["dtype"]),
        f"attention without padding: {settings['kernel']}",
        *(["padded batches with a mask"] if settings["masked"] else []),
    ]
    parts = [f"### {data}, {'text' if what == 'text' else 'with images'}\n\n{', '.join(words)}."]
    if measured:
        reference = best_standard(measured)
        parts.append(table(HEAD, [_line(row, reference) for row in measured]))
    trials = [row for row in rows if row.settings["trial"]]
    if trials:
        tried = ", ".join(f"{row.settings['batch_size']}: {_rate(row)}" for row in trials)
        parts.append(f"Standard's batch sizes that were tried for a short time (samples/s): {tried}.")
    if any(not row.settings["complete"] and "samples_per_s" in row.figures for row in measured):
        parts.append("\\* was stopped before it had trained on every sample, since time was up.")
    return "\n\n".join(parts)


def _place(row: Row) -> tuple[int, int]:
    return list(NAMES).index(row.method), row.budget or 0


def best_standard(rows: Sequence[Row]) -> float | None:
    """Samples/s of Standard at its best batch size; None: it was not measured, or did not fit."""
    rates = [float(row.figures["samples_per_s"] or 0) for row in rows if _is_measured(row, "standard")]
    return max(rates, default=None)


def _is_measured(row: Row, method: str) -> bool:
    return row.method == method and not row.settings["trial"] and "samples_per_s" in row.figures


def _rate(row: Row) -> str:
    return f"{row.figures['samples_per_s']:.3g}" if "samples_per_s" in row.figures else "out of memory"


def _line(row: Row, reference: float | None) -> list[str]:
    name = NAMES[row.method] + (
        f", batch {row.settings['batch_size']}" if "batch_size" in row.settings else f", budget {row.budget:,}"
    )
    figures: Any = row.figures
    memory = _memory(figures)
    if "samples_per_s" not in figures:
        return [name, "out of memory", *[""] * 5, memory, *[""] * 4]
    return [
        name + ("" if row.settings["complete"] else " \\*"),
        f"{figures['samples_per_s']:.3g}",
        f"{figures['samples_per_s'] / reference:.2f}" if reference else "",
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['padded_tokens_per_s']:,.0f}",
        f"{figures['padding_share']:.1%}",
        f"{figures['mfu']:.1%}" if "mfu" in figures else "",
        memory,
        f"{figures['wait_share']:.1%}",
        f"{figures['first_batch_s']:.1f}",
        f"{figures['steps']:,}",
        f"{figures['seconds']:.1f}",
    ]


def _memory(figures: Any) -> str:
    if "peak_allocated_gib" not in figures:
        return ""
    return f"{figures['peak_allocated_gib']:.1f} / {figures['peak_reserved_gib']:.1f}"


def plot(rows: Sequence[Row]) -> Any:
    """Samples/s over those of Standard at its best batch size, against the budget; one picture a cell."""
    from matplotlib.figure import Figure

    cells = _cells(rows)
    figure = Figure(figsize=(4.2 * max(1, len(cells)), 3.6), layout="constrained")
    if not cells:
        return figure
    all_axes = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for axes, ((data, what), found) in zip(all_axes, cells.items(), strict=True):
        reference = best_standard(found)
        axes.set_title(f"{data}, {what}")
        axes.set_xlabel("token budget")
        axes.axhline(1.0, color="grey", linewidth=1, label="Standard, best batch size")
        for method in NAMES:
            points = sorted(
                (row.budget or 0, float(row.figures["samples_per_s"] or 0))
                for row in found
                if _is_measured(row, method)
            )
            if method == "standard" or not points or not reference:
                continue
            axes.plot(
                [at for at, _ in points], [rate / reference for _, rate in points], marker="o", label=NAMES[method]
            )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("samples/s, to Standard")
    all_axes[0].legend(fontsize="small")
    return figure
