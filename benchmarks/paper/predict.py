"""Rows of the tables: every cell beside what the model makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.paper.cells import Cell, reference
from benchmarks.paper.model import Assumptions, Model, Works
from benchmarks.rows import RowWriter, Value


def add_fits(time_model: str, model: Model, rows: RowWriter) -> None:
    """A row for each fit: the constants, and which cells they rest on."""
    for name, fit in model.fits.items():
        rows.add(
            what="fit",
            data=", ".join(cell.settings[0].dataset for cell in fit.cells),
            method="standard",
            settings={
                "name": name,
                "time_model": time_model,
                "cells": "; ".join(str(cell.settings[0]) for cell in fit.cells),
                "fitted": ", ".join(fit.terms),
                "freedom": fit.freedom,
                "small_model": model.assume.small_model,
            },
            figures={
                "constant_s": fit.time.constant,
                "per_token_s": fit.time.per_token,
                "per_square_s": fit.time.per_square,
                "worst_error": max(fit.errors, key=abs),
            },
        )


def add_assumptions(works: Works, assume: Assumptions, rows: RowWriter) -> None:
    """A row for each data set: what is simulated of it."""
    for name, known in reference()["datasets"].items():
        profile = assume.profile(name)
        lengths = np.array(works.lengths(profile, name, assume))
        rows.add(
            what="assumption",
            data=name,
            method="all",
            depth=assume.depth,
            budget=assume.budget_of(name),
            settings={
                "samples": len(lengths),
                "paper_cv": known["length_cv"],
                "longest": profile.longest,
                "budget_from": "the paper's best" if "best_token_budget" in known else "assumed",
            },
            figures={"mean_tokens": float(lengths.mean()), "cv": float(lengths.std() / lengths.mean())},
        )


def add_cells(time_model: str, model: Model, cells: Sequence[Cell], rows: RowWriter) -> None:
    """A row for each cell; one that was fitted has no error of a prediction."""
    used = {cell for fit in model.fits.values() for cell in fit.cells}
    for cell in cells:
        first = cell.settings[0]
        rows.add(
            what="prediction",
            data=first.dataset if len({s.dataset for s in cell.settings}) == 1 else "all",
            method=cell.method,
            ranks=first.ranks,
            depth=model.assume.depth,
            budget=model.assume.budget_of(first.dataset) if len(cell.settings) == 1 else None,
            settings={
                "table": cell.table,
                "time_model": time_model,
                "datasets": ", ".join(sorted({setting.dataset for setting in cell.settings})),
                "model": "/".join(sorted({setting.model for setting in cell.settings})),
                "nodes": first.nodes,
                "source": first.source,
                "tuning": cell.tuning,
                "quantity": cell.quantity,
                "against": cell.against,
                "role": "fitted" if cell in used else "predicted",
                "note": cell.note,
            },
            figures={"paper_low": cell.low, "paper_high": cell.high, **compared(cell, model)},
        )


def compared(cell: Cell, model: Model) -> dict[str, Value]:
    """Simulated values (least and most over the cell's settings) and how they compare with the paper's."""
    values, ours = model.predict(cell), model.predict(cell, ours=True)
    figures: dict[str, Value] = {
        "simulated_low": min(values),
        "simulated_high": max(values),
        "ours_low": min(ours),
        "ours_high": max(ours),
    }
    if cell.low is None or cell.high is None:
        return figures
    if cell.is_range:
        inside = sum(cell.low <= value <= cell.high for value in values)
        return {**figures, "inside": inside, "of": len(values)}
    return {**figures, "error": values[0] / cell.low - 1.0}


def add_quality(rows: RowWriter) -> None:
    """The paper's scores, one row each; nothing is simulated."""
    for entry in reference()["quality"]:
        for method in ("standard", "sorted", "packing", "gmt", "odb"):
            if method in entry:
                rows.add(
                    what="quality",
                    data=entry["dataset"],
                    method=method,
                    settings={"model": entry.get("model"), "nodes": entry.get("nodes"), "metric": entry["metric"]},
                    figures={"paper": entry[method]},
                )


def add_claims(rows: RowWriter) -> None:
    """What the paper says of its ablations, of which no number is known."""
    for panel, text in reference()["ablations"].items():
        rows.add(what="claim", data="all", method="odb", settings={"panel": panel, "text": text}, figures={})


def add_records(rows: RowWriter) -> None:
    """The public package's records and what follows from their own figures."""
    package = reference()["public_package"]
    emitted = package["emitted_samples"]
    for record in package["records"]:
        rows.add(
            what="record",
            data=package["dataset"],
            method=record["method"],
            settings={"model": package["model"], "nodes": record["nodes"]},
            figures={
                "emitted": emitted,
                "runtime_s": record["runtime_s"],
                "samples_per_s": record["samples_per_s"],
                "samples_per_s_recomputed": emitted / record["runtime_s"],
                "real_tokens_per_s": record["real_tokens_per_s"],
                "tokens_per_sample": record["real_tokens_per_s"] * record["runtime_s"] / emitted,
                "val_loss": record["val_loss"],
                "mmmu_mc": record["mmmu_mc"],
            },
        )
