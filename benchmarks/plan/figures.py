"""What is compared: of a plan, and of a run by its audit (ODB) or the trainer's own counts (Standard)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.tools.plan.compare import Comparison
from odb_factory.tools.plan.observed import Observed
from odb_factory.tools.plan.pipeline import draw
from odb_factory.tools.plan.planner import Plan
from odb_factory.tools.plan.prediction import Prediction, useful_work

FIELDS = ("steps", "samples_per_step", "padding", "ideal_share")
"""Figures of a plan from a part of the rows whose errors are counted."""


@dataclass(frozen=True)
class Figures:
    """Of one epoch. `ideal_share` is missing where the run does not say what each rank ran."""

    steps: int
    samples_per_step: float
    padding: float
    padded_tokens: int
    ideal_share: float | None


def planned(prediction: Prediction) -> Figures:
    return Figures(**{field.name: getattr(prediction, field.name) for field in dataclasses.fields(Figures)})


def audited(output: Path, ranks: int) -> Figures:
    """Of a run with ODB, out of its audit files."""
    audits = [_lines(output / f"odb_audit.rank{rank}.jsonl") for rank in range(ranks)]
    steps = list(zip(*audits, strict=True))
    lengths = [length for step in steps for line in step for length in line["lengths"]]
    total = sum(line["padded_tokens"] for step in steps for line in step)
    samples = sum(len(line["indices"]) for step in steps for line in step)
    attention = json.loads((output / "odb_summary.json").read_text(encoding="utf-8"))["attention_length"]
    ideal = useful_work(lengths, attention) / (ranks * sum(max(line["work"] for line in step) for step in steps))
    return Figures(len(steps), samples / len(steps), 1 - sum(lengths) / total, total, ideal)


def counted(output: Path, *, samples: int, tokens: int) -> Figures:
    """Of a run of Standard on so many samples and real tokens, by the trainer's counts of steps and padded tokens."""
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    padded, steps = state["num_input_tokens_seen"], state["global_step"]
    return Figures(steps, samples / steps, 1 - tokens / padded, padded, None)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def errors_of_parts(whole: Plan, draws: int, count: int) -> dict[str, dict[str, float]]:
    """Method -> how far plans from `count` of the rows that `whole` read are off it, over `draws` draws.

    For each of `FIELDS` its mean error and its largest, relative to the true figure; that of `padding` is a difference.
    """
    parts = [_part(whole, count, seed) for seed in range(draws)]
    config = whole.config
    found = {}
    for method, true, guesses in (
        ("standard", whole.standard, [part.standard() for part in parts]),
        ("odb", whole.own, [part.online(config.token_budget, config.depth) for part in parts]),
    ):
        figures = found[method] = dict[str, float]()
        for field in FIELDS:
            scale = 1.0 if field == "padding" else getattr(true, field)
            errors = [abs(getattr(guess, field) - getattr(true, field)) / scale for guess in guesses]
            figures |= {f"{field}_mean_error": sum(errors) / draws, f"{field}_largest_error": max(errors)}
    return found


def _part(whole: Plan, count: int, seed: int) -> Comparison:
    """As if only `count` rows had been drawn; each sample is processed by itself, so none is processed again."""
    observed = whole.observed
    drawn = set(draw(observed.size, count, seed))
    part = Observed(
        observed.size,
        tuple(meta for meta in observed.metas if meta.index in drawn),
        tuple(drop for drop in observed.dropped if drop.index in drawn),
    )
    config = dataclasses.replace(whole.config, seed=seed)
    return Comparison(part, config, whole.fixed, world_size=whole.world_size, packable=False)
