"""A plan as text of at most 100 columns, in colour on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from odb_factory.tools.plan.memory import size
from odb_factory.tools.plan.observed import SHORT_OF_MEAN, histogram
from odb_factory.tools.plan.planner import Plan
from odb_factory.tools.plan.prediction import Prediction, ranks_in_words

WIDTH = 100
BARS = 12
"""Most lines of the histogram."""
BAR_WIDTH = 56

VERDICTS = {
    "worth it": "ODB is worth it for this data",
    "small gain": "ODB brings a small gain for this data",
    "not worth it": "ODB is not worth it for this data",
    "cannot tell": "it cannot be told whether ODB is worth it for this data",
}


STYLES = {"Result": "bold", "Warning": "yellow", "A run would fail": "bold red"}
"""By the first words of a conclusion."""


def as_text(plan: Plan, *, terminal: bool = False) -> str:
    """The whole plan; `terminal` adds the escape sequences for colours."""
    console = Console(force_terminal=terminal, width=2 * WIDTH, highlight=False, markup=False)
    with console.capture() as captured:
        for part in (_head(plan), _lengths(plan), _histogram(plan), _table(plan), _closing(plan)):
            console.print(part, "", sep="\n", soft_wrap=True)
    return "\n".join(map(str.rstrip, captured.get().strip("\n").split("\n")))


def _wrap(text: str, indent: str = "  ") -> str:
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    observed = plan.observed
    read = len(observed.metas) + len(observed.dropped)
    dropped = ", ".join(f"{reason}: {count}" for reason, count in observed.reasons().items())
    lines = [
        f"Plan of {plan.recipe.path.name} on {ranks_in_words(plan.world_size)}, seed {plan.config.seed}",
        f"{read:,} of {observed.size:,} rows went through the recipe's own data pipeline"
        + (f"; dropped: {dropped}" if dropped else ""),
    ]
    return "\n".join(map(_wrap, lines))


def _lengths(plan: Plan) -> str:
    figures = plan.lengths
    lines = [
        f"Lengths in tokens: mean {figures.mean:,.0f}, CV {figures.cv:.2f}, min {figures.least:,}, median "
        f"{figures.median:,.0f}, p90 {figures.p90:,.0f}, p99 {figures.p99:,.0f}, max {figures.most:,}",
        f"Shares: short (below {SHORT_OF_MEAN:g} x mean) {figures.short:.1%}, at the cutoff {plan.fixed.cutoff:,} "
        f"(truncated) {figures.truncated:.1%}, above it {figures.above_cutoff:.1%}, above the budget "
        f"{plan.config.token_budget:,} {figures.above_budget:.1%}, with images or videos {figures.with_media:.1%}",
        f"Loss tokens: {figures.loss_share:.1%} of a sample's tokens on average (sd {figures.loss_share_sd:.1%})",
    ]
    return "\n".join(map(_wrap, lines))


def _histogram(plan: Plan) -> str:
    edges, counts = histogram([meta.length for meta in plan.observed.metas], BARS)
    most = max(counts)
    lines = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * (round(count / most * BAR_WIDTH) or bool(count))
        lines.append(f"  {low:>7,} to {high - 1:>7,}  {bar} {count / len(plan.observed.metas):.1%}")
    return "\n".join(lines)


def _table(plan: Plan) -> Group:
    batch = f"batch {plan.fixed.batch_size}"
    rows = [(f"Standard, {batch}", plan.standard), (f"Sorted by length, {batch}", plan.sorted)]
    if plan.packing is not None:
        rows.append((f"Packing (bound), {batch}", plan.packing))
    seen = dict.fromkeys([*plan.budgets, *plan.depths, plan.advice.prediction])
    online = sorted(seen, key=lambda p: (p.budget or 0, p.depth or 0))
    rows += [(f"ODB, budget {p.budget:,}, depth {p.depth:,}", p) for p in online]
    table = Table(box=None, header_style="", padding=(0, 0, 0, 1))
    table.add_column("", min_width=30)
    for figure in (" padding", "samples/step", "steps/epoch", "ideal time", " speed"):
        table.add_column(figure, justify="right")
    table.add_column("")
    for name, prediction in rows:
        advised = prediction == plan.advice.prediction
        marks = ["recipe"] * (prediction == plan.own) + ["advised"] * advised
        table.add_row(f" {name}", *_figures(prediction, plan), ", ".join(marks), style="bold" if advised else "")
    note = (
        "Sorted: group_by_length. samples/step: of all ranks. ideal time: real tokens / (ranks x padded tokens of each "
        f"step's slowest rank){_attention(plan)}. speed: by that, Standard = 1; a model, not a measurement"
        + ("; -: odb_overlong drops samples there. " if any(p.overlong for p in online) else ". ")
        + _basis(plan)
    )
    return Group(table, _wrap("  " + note))


def _attention(plan: Plan) -> str:
    length = plan.config.attention_length
    return "" if length is None else f", attention included (as much as all else in rows of {length:,} tokens)"


def _basis(plan: Plan) -> str:
    observed, seed = plan.observed, plan.config.seed
    if plan.own.exact and plan.standard.exact:
        return f"The figures of Standard and ODB are exact for the first epoch of a run with seed {seed}."
    left_out = f"The {len(observed.bad):,} bad samples are left out of all figures" if observed.bad else ""
    if observed.complete:
        if left_out:
            return f"{left_out}, which are therefore not exact: stock LLaMA-Factory stops at a bad sample."
        return f"Estimated for an epoch of {observed.size:,} rows."
    error = observed.error_of_mean
    far = "how good they are cannot be told from one sample"
    if error is not None:
        far = f"the steps of ODB are good to about {error:.1%} (two standard errors of the mean length)"
    estimate = f"Estimated for an epoch of {observed.size:,} rows out of those that were read: {far}."
    return f"{estimate} {left_out}." if left_out else estimate


def _figures(prediction: Prediction, plan: Plan) -> Iterator[str]:
    yield f"{prediction.padding:.1%}"
    yield f"{prediction.samples_per_step:.1f}"
    yield f"{prediction.steps:,}"
    yield f"{prediction.ideal_share:.3f}"
    gain = prediction.gain_over(plan.standard)
    yield "-" if prediction.overlong else f"{gain:,.2f}" if gain < 100 else f"{gain:,.0f}"


def _closing(plan: Plan) -> Text:
    lines = (Text(_wrap(line), STYLES.get(line.partition(":")[0], "")) for line in _conclusions(plan))
    return Text("\n").join(lines)


def _conclusions(plan: Plan) -> Iterator[str]:
    memory, advice, depth = plan.memory, plan.advice, plan.config.depth
    bound = "without a bound" if memory.bound is None else f"at most {size(memory.bound)}"
    origin = "odb_window_bytes" if memory.bound_is_given else "odb_window_bytes, its default on this host"
    ranks = "rank" if memory.ranks_per_host == 1 else "ranks"
    yield (
        f"Memory: a sample takes {size(memory.mean_bytes)} (the largest {size(memory.most_bytes)}), a window of "
        f"{depth:,} {size(memory.window(depth))}, the windows of {memory.ranks_per_host} {ranks} on a host "
        f"{size(memory.host(depth))}; a rank's may take {bound} ({origin})."
    )
    if plan.fixed.accumulation > 1:
        yield (
            f"Updates: {plan.standard.updates:,} an epoch with Standard, {plan.own.updates:,} with ODB "
            f"(gradient_accumulation_steps {plan.fixed.accumulation})."
        )
    yield f"Budget: odb_token_budget {advice.budget}: {advice.budget_reason}."
    windows = f"; a host's windows then hold {size(memory.host(advice.depth))}" if advice.depth != depth else ""
    yield f"Depth:  odb_depth {advice.depth}: {advice.depth_reason}{windows}."
    yield f"Result: {VERDICTS[advice.verdict]}: {advice.verdict_reason}."
    # last, so that they are in view on a terminal
    yield from (f"Warning: {warning}" for warning in plan.warnings)
    yield from (f"A run would fail: {stop}" for stop in plan.stops)
