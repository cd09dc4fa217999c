"""Throughput against the budget, the depth, the share of short samples and the variation of lengths: simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.lengths import Profile
from benchmarks.paper.cells import Setting
from benchmarks.paper.model import OURS, Assumptions, Model, Works
from benchmarks.rows import RowWriter

BUDGETS = (4096, 8192, 12288, 16384, 24576, 32768)
DEPTHS = (16, 64, 256, 1024, 2048)
SHARES = (0.0, 0.15, 0.3, 0.45, 0.55)
"""Of samples in the short mode; with MM-Mix' variation more is not possible."""
VARIATIONS = (0.1, 0.3, 0.5, 0.8, 1.1)

SETTINGS = (
    Setting(dataset="ultrachat", model="8B", nodes=1),
    Setting(dataset="llava", model="8B", nodes=1),
    Setting(dataset="sharegpt4o", model="8B", nodes=1),
    Setting(dataset="mm_mix", model="2B", nodes=2),
)
METHODS = ("standard", "odb", OURS)


@dataclasses.dataclass(frozen=True)
class Point:
    """One x of one panel."""

    panel: str
    x: float
    setting: Setting
    profile: Profile
    budget: int
    depth: int


def points(base: Assumptions, *, quick: bool) -> Iterator[Point]:
    """All that is simulated; `quick`: the ends of each panel."""

    def some(values: Sequence[float]) -> Sequence[float]:
        return (values[0], values[-1]) if quick else values

    for setting in SETTINGS[-2:] if quick else SETTINGS:
        profile, budget = base.profile(setting.dataset), base.budget_of(setting.dataset)
        for value in some(BUDGETS):
            yield Point("budget", value, setting, profile, int(value), base.depth)
        for value in some(DEPTHS):
            yield Point("depth", value, setting, profile, budget, int(value))
    mixed = SETTINGS[-1]
    profile, budget = base.profile(mixed.dataset), base.budget_of(mixed.dataset)
    for value in some(SHARES):
        yield Point("short share", value, mixed, dataclasses.replace(profile, short_share=value), budget, base.depth)
    for value in some(VARIATIONS):
        one_mode = dataclasses.replace(profile, short_share=0.0, cv=value)
        yield Point("variation", value, mixed, one_mode, budget, base.depth)


def add_ablations(models: Mapping[str, Model], works: Works, rows: RowWriter, *, quick: bool) -> None:
    """Rows of every point and method, by each model of step time."""
    base, panel = next(iter(models.values())).assume, ""
    for point in points(base, quick=quick):
        if point.panel != panel:
            panel = point.panel
            print(f"ablation: {panel}, {point.setting.dataset}", flush=True)
        assume = dataclasses.replace(base, depth=point.depth)
        times = {name: model.time(point.setting) for name, model in models.items()}
        lengths = np.array(works.lengths(point.profile, point.setting.dataset, assume))
        for method in METHODS:
            work = works.of_profile(
                point.profile, point.setting.dataset, point.setting.ranks, method, assume, point.budget
            )
            rows.add(
                what="ablation",
                data=point.setting.dataset,
                method=method,
                ranks=point.setting.ranks,
                depth=point.depth,
                budget=point.budget,
                settings={
                    "panel": point.panel,
                    "x": point.x,
                    "model": point.setting.model,
                    "nodes": point.setting.nodes,
                    "short_share": point.profile.short_share,
                },
                figures={
                    **{f"samples_per_s_{name}": work.rate(time) for name, time in times.items()},
                    "cv": float(lengths.std() / lengths.mean()),
                    "mean_tokens": float(lengths.mean()),
                    "samples_per_step": work.emitted / work.steps,
                },
            )
