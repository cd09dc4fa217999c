"""`odb_report.png`: a run in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.trainer.series import BIN_EDGES

REPORT_NAME = "odb_report.png"

_REAL, _LIMIT, _PLAIN = "#2a6f97", "#c1121f", "#6c757d"


@dataclass(frozen=True)
class RunPicture:
    """What is drawn."""

    title: str
    lengths: np.ndarray
    """(bins,) samples of all ranks by length; see `BIN_EDGES`."""
    steps: np.ndarray
    """(rows, 6): steps, samples, real tokens, padded tokens, seconds, seconds of waiting for data; sums of a stretch.

    Tokens and samples are those of all ranks, times those of rank 0.
    """
    before: int
    """Samples emitted before what is drawn, in a run that was resumed."""
    token_budget: int
    world_size: int
    table: Sequence[tuple[str, str]]
    """Names and figures of the whole run."""


def draw(path: Path, run: RunPicture) -> None:
    """Write the picture; ImportError where there is no matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    figure.suptitle(run.title, fontsize=12)
    axes = figure.subplots(2, 3)
    _lengths(axes[0, 0], run)
    _step_sizes(axes[0, 1], run)
    _table(axes[0, 2], run.table)
    emitted = run.before + run.steps[:, 1].cumsum()
    _tokens(axes[1, 0], run, emitted)
    padded = np.maximum(run.steps[:, 3], 1)
    _share(axes[1, 1], emitted, 1 - run.steps[:, 2] / padded, "padding", "share of the padded tokens")
    seconds = np.maximum(run.steps[:, 4], 1e-9)
    _share(axes[1, 2], emitted, run.steps[:, 5] / seconds, "waiting for data (rank 0)", "share of the time")
    scratch = path.with_suffix(".tmp.png")
    figure.savefig(scratch, dpi=110)
    scratch.replace(path)


def _lengths(axes: Any, run: RunPicture) -> None:
    axes.set_title("lengths")
    used = np.flatnonzero(run.lengths)
    if len(used):
        part = slice(used[0], used[-1] + 1)
        axes.stairs(run.lengths[part], BIN_EDGES[part.start : part.stop + 1], fill=True, color=_REAL)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if BIN_EDGES[part.start] <= run.token_budget <= 4 * BIN_EDGES[part.stop]:
            axes.axvline(run.token_budget, color=_LIMIT, linewidth=1, label="token budget")
            axes.legend(fontsize=8)
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")


def _step_sizes(axes: Any, run: RunPicture) -> None:
    axes.set_title("step sizes, all ranks together")
    sizes = run.steps[:, 1] / run.steps[:, 0]
    low, high = np.floor(sizes.min()), np.ceil(sizes.max())
    bins = np.arange(low - 0.5, high + 1.5) if high - low <= 40 else np.linspace(low, high, 41)
    axes.hist(sizes, bins=bins, weights=run.steps[:, 0], color=_REAL)
    axes.set_xlabel("samples of a step")
    axes.set_ylabel("steps")


def _tokens(axes: Any, run: RunPicture, emitted: np.ndarray) -> None:
    axes.set_title("tokens of a step, all ranks together")
    axes.plot(emitted, run.steps[:, 3] / run.steps[:, 0], color=_PLAIN, linewidth=1, label="padded")
    axes.plot(emitted, run.steps[:, 2] / run.steps[:, 0], color=_REAL, linewidth=1, label="real")
    axes.axhline(run.token_budget * run.world_size, color=_LIMIT, linewidth=1, label="budget x ranks")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples emitted")
    axes.set_ylabel("tokens")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=8, loc="lower left")


def _share(axes: Any, emitted: np.ndarray, share: np.ndarray, title: str, label: str) -> None:
    axes.set_title(title)
    axes.plot(emitted, 100 * share, color=_REAL, linewidth=1)
    axes.set_ylim(0, max(10.0, 105 * float(share.max(initial=0.0))))
    axes.set_xlabel("samples emitted")
    axes.set_ylabel(f"{label} (%)")


def _table(axes: Any, table: Sequence[tuple[str, str]]) -> None:
    axes.set_axis_off()
    for place, (name, value) in enumerate(table):
        height = 1 - (place + 0.5) / max(len(table), 12)
        axes.text(0.0, height, name, transform=axes.transAxes, fontsize=9, va="center", color=_PLAIN)
        axes.text(1.0, height, value, transform=axes.transAxes, fontsize=9, va="center", ha="right")


def table_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of `odb_summary.json` that a reader wants first: names and values, as text."""
    window = f"{summary['window_samples']:,.0f} samples, {summary['window_bytes'] / 2**20:,.1f} MiB"
    rows = [
        ("samples (different ones)", f"{summary['samples']:,} ({summary['unique']:,})"),
        ("samples dropped (bad ones)", f"{sum(summary['dropped'].values()):,} ({summary['bad']:,})"),
        ("steps (micro-batches of weight 0)", f"{summary['steps']:,} ({summary['fillers']:,})"),
        ("samples per step, all ranks", f"{summary['samples_per_step']:.2f}"),
        ("updates (samples each)", f"{summary['updates']:,} ({summary['samples_per_update']:.1f})"),
        ("padding", f"{summary['padding']:.1%}"),
        ("imbalance of ranks", f"{summary['imbalance']:.1%}"),
        ("waiting for data", f"{summary['data_wait']:.1%}"),
        ("samples / s", f"{summary['samples_per_second']:,.2f}"),
        ("real tokens / s", f"{summary['tokens_per_second']:,.0f}"),
        ("padded tokens / s", f"{summary['padded_tokens_per_second']:,.0f}"),
        ("window of a rank, mean", window),
        ("alignment, with waits for others", f"{summary['align_ms']:,.1f} ms"),
    ]
    if summary["left"]:
        rows.insert(1, ("left out (odb_quota)", f"{summary['left']:,}"))
    return rows
