"""Tables of what stands behind the predictions, of quality, of the public records; out of rows only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.paper.text import NAMES, number, place, short, span
from benchmarks.rows import Row
from benchmarks.tables import table


def quality(rows: Sequence[Row]) -> str:
    """Scores of the paper; the rest stays blank."""
    lines = [
        [
            NAMES.get(row.data, row.data),
            row.settings["model"] or "",
            row.settings["metric"],
            row.method,
            row.figures["paper"],
            "",
            "",
        ]
        for row in rows
        if row.what == "quality"
    ]
    if not lines:
        return ""
    head = ("data", "model", "metric", "method", "paper", "measured here", "predicted")
    note = (
        "Nothing here predicts a score, and MMLU and MMMU are not at hand, so that both columns stay blank; the "
        "benchmark `quality` measures a loss and a score of a task of its own."
    )
    return f"### Quality\n\n{table(head, lines)}\n\n{note}"


def records(rows: Sequence[Row]) -> str:
    """Whether the public records agree with themselves."""
    records = [row for row in rows if row.what == "record"]
    if not records:
        return ""
    each = [number(row.figures["tokens_per_sample"]) for row in records]
    lines = [
        [
            row.settings["nodes"],
            row.method,
            row.figures["runtime_s"],
            row.figures["samples_per_s"],
            f"{number(row.figures['samples_per_s_recomputed']):.2f}",
            row.figures["real_tokens_per_s"],
            f"{number(row.figures['tokens_per_sample']):.0f}",
            row.figures["val_loss"],
            row.figures["mmmu_mc"],
        ]
        for row in records
    ]
    head = ("nodes", "method", "runtime s", "samples/s", "recomputed", "real tokens/s", "tokens/sample", "val loss")
    text = "Samples/s are 196,200 emitted samples over the runtime, as published."
    if max(each) > 1.02 * min(each):
        text += (
            " By their own tokens/s x runtime the records do not agree on the tokens of the same samples: "
            f"{min(each):.0f} to {max(each):.0f} each. A speed-up by tokens is another number than one by samples."
        )
    return f"### Checks of the public records\n\n{table((*head, 'MMMU-MC'), lines)}\n\n{text}"


def assumptions(rows: Sequence[Row]) -> str:
    """What was simulated, and what of it is known."""
    lines = [
        [
            NAMES.get(row.data, row.data),
            row.settings["samples"],
            f"{number(row.figures['cv']):.2f}",
            row.settings["paper_cv"],
            f"{number(row.figures['mean_tokens']):.0f}",
            row.settings["longest"],
            f"{row.budget} ({row.settings['budget_from']})",
            row.depth,
        ]
        for row in rows
        if row.what == "assumption"
    ]
    if not lines:
        return ""
    head = (
        "data",
        "samples",
        "CV",
        "paper's CV",
        "mean tokens (assumed)",
        "longest (assumed)",
        "budget",
        "D (assumed)",
    )
    note = "Standard and Sorted have one sample in a micro-batch, a node has 8 ranks."
    return f"### Assumptions\n\n{table(head, lines)}\n\n{note}"


def fits(rows: Sequence[Row]) -> str:
    """The constants of step time."""
    found = [row for row in rows if row.what == "fit"]
    if not found:
        return ""
    lines = [
        [
            f"{row.settings['time_model']}: {row.settings['name']}",
            row.settings["cells"],
            row.settings["fitted"] or "none: tokens alone would take longer",
            row.settings["freedom"],
            f"{number(row.figures['constant_s']):.3f}",
            f"{1e3 * number(row.figures['per_token_s']):.3f}",
            f"{1e6 * number(row.figures['per_square_s']):.4f}",
            f"{number(row.figures['worst_error']):+.1%}",
        ]
        for row in found
    ]
    head = ("constants", "Standard's cells", "fitted", "degrees of freedom", "constant s", "ms/token", "us/square")
    small = number(found[0].settings["small_model"])
    notes = [
        f"2B's cost of a token and of a square is assumed to be {small:g} of 8B's, by parameters. No cell of Standard "
        "on two nodes is published for 8B: what its second node adds to the constant is taken from 2B, by parameters.",
        "With batches of one sample, Standard cannot tell what each step costs from what each sample costs, and only "
        "the first is saved by larger batches: what is really a cost of samples makes predictions for ODB too high.",
    ]
    if any(row.settings["freedom"] == 0 for row in found):
        notes.insert(0, "A fit without a degree of freedom goes through its cells, whatever the model is worth.")
    return f"### Constants\n\n{table((*head, 'worst error'), lines)}\n\n{' '.join(notes)}"


def sensitivity(rows: Sequence[Row]) -> str:
    """Predictions under other assumptions, a table for each model of step time."""
    found_of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.what == "sensitivity":
            found_of[str(row.settings["time_model"])].append(row)
    if not found_of:
        return ""
    note = (
        "Each column varies one assumption, fits the constants anew and predicts anew, on a part of each "
        "data set (at most 60,000 samples); bold where the range holds the paper's number."
    )
    parts = [f"**{name}**\n\n{_sensitivity_table(found)}" for name, found in found_of.items()]
    return "\n\n".join(["### Sensitivity", *parts, note])


def _sensitivity_table(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in rows:
        s = row.settings
        what = {"odb": "ODB", "sorted": "Sorted"}[row.method]
        what += " / Standard" if s["quantity"] == "speedup" else ", samples/s"
        key = (NAMES.get(row.data, row.data), place(row), what, short(number(row.figures["paper"])))
        low, high = number(row.figures["low"]), number(row.figures["high"])
        inside = low <= number(row.figures["paper"]) <= high
        text = span(low, high)
        found[key][str(s["varied"])] = f"**{text}**" if inside else text
    varied = list(dict.fromkeys(name for values in found.values() for name in values))
    lines = [[*key, *(values.get(name, "") for name in varied)] for key, values in found.items()]
    return table(("data", "setting", "figure", "paper", *varied), lines)


def open_by_standard(rows: Sequence[Row]) -> str:
    """Speed-ups as a function of the constant of a step."""
    found: dict[str, dict[float, str]] = defaultdict(dict)
    paper: dict[str, str] = {}
    for row in rows:
        if row.what == "open":
            found[row.data][number(row.settings["constant_s"])] = f"{number(row.figures['speedup']):.2f}"
            paper[row.data] = short(number(row.figures["paper"]))
    if not found:
        return ""
    constants = sorted({value for values in found.values() for value in values})
    head = ("data, 8B, 1 node", "paper", *(f"{value:.2f} s" for value in constants))
    lines = [
        [NAMES.get(data, data), paper[data], *(values.get(c, "") for c in constants)] for data, values in found.items()
    ]
    note = (
        "ODB over Standard where the constant of a step is given instead of fitted: what a token costs then follows "
        "from the data set's own Standard row, and the mean length matters little. This is what Standard's rows leave "
        "open by themselves."
    )
    return f"### Speed-up against the constant of a step\n\n{table(head, lines)}\n\n{note}"


def attention(rows: Sequence[Row]) -> str:
    """Ours against the paper's protocol, by the cost of attention."""
    found: dict[str, dict[float, str]] = defaultdict(dict)
    for row in rows:
        if row.what == "attention":
            ratio = number(row.settings["square_ratio"])
            found[row.data][ratio] = f"{number(row.figures['over_paper']):.3f}"
    if not found:
        return ""
    ratios = sorted({ratio for values in found.values() for ratio in values})
    lines = [[NAMES.get(data, data), *(values.get(r, "") for r in ratios)] for data, values in found.items()]
    head = ("data, 8B, 1 node", *(f"{ratio:.0e}" if ratio else "0" for ratio in ratios))
    fitted = [
        number(row.figures["per_square_s"]) / number(row.figures["per_token_s"])
        for row in rows
        if row.what == "fit" and number(row.figures["per_token_s"])
    ]
    note = (
        "Rate of ours over that of the paper's protocol where attention costs so much: a square over a token. The "
        "shape of an 8B model has about 2e-5 with causal attention, 4e-5 without; ours evens the ranks out as if it "
        "were the latter, whatever it is. The paper pairs them by length."
    )
    if fitted:
        note += f" A's fit has {fitted[0]:.0e}, so that *ours* by A stands at that end."
    return f"### Ours and the paper's protocol, by the cost of attention\n\n{table(head, lines)}\n\n{note}"


def ablations(rows: Sequence[Row]) -> str:
    """Throughput against each thing varied."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.what == "ablation":
            found[row.settings["panel"], row.data, place(row), row.settings["x"]][row.method] = row
    if not found:
        return ""
    lines = [
        [panel, NAMES.get(data, data), where, f"{x:g}", *(_speedup(of, m, t) for t in "AB" for m in ("odb", "ours"))]
        for (panel, data, where, x), of in found.items()
    ]
    head = ("varied", "data", "setting", "value", "paper's protocol, A", "ours, A", "paper's protocol, B", "ours, B")
    note = (
        "Simulated rate over Standard's. Memory is not modelled, so that nothing here bounds the budget as it does in "
        "the paper; nor is the time to read samples, which overlaps with training."
    )
    claims = "\n".join(f"- {row.settings['panel']}: {row.settings['text']}" for row in rows if row.what == "claim")
    said = f"What the paper says:\n\n{claims}\n\n" if claims else ""
    return f"### Ablations\n\n{said}{table(head, lines)}\n\n{note}"


def _speedup(of: dict[str, Row], method: str, time_model: str) -> str:
    name = f"samples_per_s_{time_model}"
    if method not in of or "standard" not in of:
        return ""
    return f"{number(of[method].figures[name]) / number(of['standard'].figures[name]):.2f}"
