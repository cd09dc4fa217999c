"""A plan as a figure."""

from __future__ import annotations

import os
from typing import Any

from odb_factory.tools.plan.memory import size
from odb_factory.tools.plan.observed import histogram
from odb_factory.tools.plan.planner import Plan
from odb_factory.tools.plan.prediction import Prediction, ranks_in_words
from odb_factory.tools.plan.text import VERDICTS

GREY, BLUE, ORANGE, LIGHT = "#8a8f98", "#1f5fa8", "#d9772b", "#c9d6e8"


def write_plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a PNG; OSError if that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    gain = f"{plan.advice.gain:.2f}x of Standard's speed, by the work of the slowest rank"
    told = VERDICTS[plan.advice.verdict]
    title = told[0].upper() + told[1:] if plan.advice.verdict == "cannot tell" else f"{told}: {gain}"
    figure.suptitle(f"{title}\n{plan.recipe.path.name}, {ranks_in_words(plan.world_size)}", fontsize=12)
    _lengths(axes[0, 0], plan)
    _methods(axes[0, 1], plan)
    depth, budget = f"depth {plan.config.depth:,}", f"budget {plan.config.token_budget:,}"
    _sweep(axes[1, 0], plan.budgets, [f"{p.budget:,}\n{_samples(p)}" for p in plan.budgets], plan)
    axes[1, 0].set(title=f"ODB by token budget ({depth})", xlabel="token budget, samples a step (all ranks)")
    labels = [f"{p.depth:,}\n{size(plan.memory.host(p.depth or 0))}" for p in plan.depths]
    _sweep(axes[1, 1], plan.depths, labels, plan)
    axes[1, 1].set(title=f"ODB by depth ({budget})", xlabel="depth, memory of a host's windows")
    lines, names = axes[1, 1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _samples(prediction: Prediction) -> str:
    return f"{prediction.samples_per_step:,.1f} a step"


def _lengths(axis: Any, plan: Plan) -> None:
    figures = plan.lengths
    edges, counts = histogram([meta.length for meta in plan.observed.metas])
    shares = [100 * count / len(plan.observed.metas) for count in counts]
    axis.bar(edges[:-1], shares, width=edges[1] - edges[0], align="edge", color=LIGHT, edgecolor=BLUE, linewidth=0.6)
    axis.axvline(figures.mean, color=ORANGE, linewidth=1.6, label=f"mean {figures.mean:,.0f} (CV {figures.cv:.2f})")
    for value, name, style in ((plan.fixed.cutoff, "cutoff", "--"), (plan.config.token_budget, "budget", ":")):
        if value <= 1.3 * edges[-1]:
            axis.axvline(value, color="black", linestyle=style, linewidth=1.2, label=f"{name} {value:,}")
    axis.legend(frameon=False, fontsize=9)
    axis.set(
        title=f"Lengths of {len(plan.observed.metas):,} samples ({figures.short:.0%} short)",
        xlabel="tokens",
        ylabel="% of samples",
        xlim=(0, None),
    )
    _bare(axis)


def _methods(axis: Any, plan: Plan) -> None:
    batch = plan.fixed.batch_size
    rows = [(f"Standard, batch {batch}", plan.standard, GREY), (f"Sorted, batch {batch}", plan.sorted, GREY)]
    if plan.packing is not None:
        rows.append(("Packing (bound)", plan.packing, GREY))
    rows.append((f"ODB {plan.own.budget:,} x {plan.own.depth:,}\n(recipe)", plan.own, BLUE))
    if plan.advice.prediction != plan.own:
        best = plan.advice.prediction
        rows.append((f"ODB {best.budget:,} x {best.depth:,}\n(advised)", best, BLUE))
    rows.reverse()
    names, predictions, colors = zip(*rows, strict=True)
    bars = axis.barh(names, [p.ideal_share for p in predictions], color=colors, height=0.62)
    texts = [
        f"{p.ideal_share:.2f}, padding {p.padding:.0%}, {p.steps:,} steps"
        + (f", only {p.samples:,} samples" if p.overlong else "")
        for p in predictions
    ]
    for bar, text, prediction in zip(bars, texts, predictions, strict=True):
        inside = prediction.ideal_share > 0.5
        x, color = (0.015, "white") if inside else (prediction.ideal_share + 0.015, "black")
        axis.text(x, bar.get_y() + bar.get_height() / 2, text, color=color, va="center", fontsize=9)
    axis.set(title="Share of ideal time, one epoch", xlim=(0, 1), xlabel="1 = no padding and no waiting")
    _bare(axis)


def _sweep(axis: Any, predictions: tuple[Prediction, ...], labels: list[str], plan: Plan) -> None:
    at = list(range(len(predictions)))
    axis.plot(at, [p.ideal_share for p in predictions], "o-", color=BLUE, label="share of ideal time")
    axis.plot(at, [p.padding for p in predictions], "s--", color=ORANGE, label="padding")
    for x, prediction in zip(at, predictions, strict=True):
        for value, color, above in ((prediction.ideal_share, BLUE, True), (prediction.padding, ORANGE, False)):
            axis.annotate(
                f"{value:.2f}",
                (x, value),
                textcoords="offset points",
                xytext=(0, 7 if above else -14),
                ha="center",
                color=color,
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.75},
            )
        if prediction == plan.own:
            axis.axvspan(x - 0.3, x + 0.3, color=LIGHT, alpha=0.5, label="recipe", zorder=0)
    axis.axhline(plan.standard.ideal_share, color=GREY, linestyle=":", label="Standard's share of ideal time")
    axis.set_xticks(at, labels, fontsize=9)
    axis.set(ylim=(-0.09, 1.09), xlim=(-0.5, len(at) - 0.5))
    _bare(axis)


def _bare(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.title.set_fontsize(11)
