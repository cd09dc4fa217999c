"""Online Dynamic Batching, predicted by the real core on simulated ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.core.simulate import Epoch, simulate
from odb_factory.tools.plan.observed import EpochSamples
from odb_factory.tools.plan.prediction import Prediction, padded_and_slowest, useful_work

MOST_SIMULATED = 300_000
"""Most samples of an epoch that are simulated; a longer epoch is extrapolated."""

LEAST_WINDOWS = 12
"""Fewest windows (of all ranks) in a simulated epoch, so that most of it is neither ramp nor drain."""


def predict_online(
    make: Callable[[int], EpochSamples],
    size: int,
    config: OdbConfig,
    world_size: int,
    samples_per_update: int | None = None,
) -> Prediction:
    """One epoch of `size` samples.

    Up to `MOST_SIMULATED` samples (more where the windows of all ranks are larger) the epoch is simulated as it is,
    ramp and drain included. Beyond that, epochs of that many and of half as many are simulated: ramp and drain are in
    both, so that their difference is steady state, and the rest of the epoch is extrapolated from it.

    Args:
        make: returns an epoch of a given number of samples.
        samples_per_update: `odb_samples_per_update`; None: updates are of `config.steps_multiple` steps.
    """
    most = max(MOST_SIMULATED, LEAST_WINDOWS * world_size * config.depth)
    if size <= most:
        return _simulated(make(size), config, world_size, samples_per_update)
    half = _simulated(make(most // 2), config, world_size, samples_per_update)
    whole = _simulated(make(most), config, world_size, samples_per_update)
    return _extrapolated(half, whole, (size - most) / (most - most // 2), config.steps_multiple)


def _simulated(data: EpochSamples, config: OdbConfig, world_size: int, samples_per_update: int | None) -> Prediction:
    budget = make_budget(config)
    overlong: set[int] = set()
    if config.overlong == "drop":
        overlong = {s.index for s in data.usable if budget.overlong(s)}
    epoch = simulate(data.samples, config, world_size, dropped=data.dropped | overlong)
    made = summarize(epoch, config, world_size, samples_per_update=samples_per_update, exact=data.exact)
    return dataclasses.replace(made, overlong=len(overlong))


def summarize(
    epoch: Epoch, config: OdbConfig, world_size: int, *, samples_per_update: int | None = None, exact: bool
) -> Prediction:
    """The prediction from a simulated epoch."""
    steps = list(zip(*epoch.steps, strict=True))
    groups = [[step.group for step in ranks] for ranks in steps]
    padded, slowest = padded_and_slowest([[(g.cost, g.work) if g else (0, 0) for g in ranks] for ranks in groups])
    lengths = [sample.length for ranks in groups for group in ranks if group for sample in group.samples]
    totals = [ranks[0].totals for ranks in steps]
    return Prediction(
        method="odb",
        world_size=world_size,
        budget=config.token_budget,
        depth=config.depth,
        samples=sum(t.samples for t in totals),
        useful_work=useful_work(lengths, config.attention_length),
        tokens=sum(t.tokens for t in totals),
        padded_tokens=padded,
        slowest_work=slowest,
        steps=len(steps),
        updates=count_updates([t.samples for t in totals], config.steps_multiple, samples_per_update),
        fillers=sum(step.group is None for ranks in steps for step in ranks),
        short_windows=epoch.short_windows,
        exact=exact,
    )


def count_updates(samples: Sequence[int], accumulation: int, samples_per_update: int | None) -> int:
    """Optimizer updates in an epoch, given the samples of each step over all ranks."""
    if samples_per_update is None:
        return -(-len(samples) // accumulation)
    updates = pending = 0
    for number, count in enumerate(samples, start=1):
        pending += count
        if pending >= samples_per_update or number == len(samples):
            updates, pending = updates + 1, 0
    return updates


def _extrapolated(half: Prediction, whole: Prediction, times: float, accumulation: int) -> Prediction:
    """`whole` plus `times` the difference between the two."""
    names = (
        "samples",
        "useful_work",
        "tokens",
        "padded_tokens",
        "slowest_work",
        "steps",
        "updates",
        "fillers",
        "short_windows",
        "overlong",
    )
    values = {name: getattr(whole, name) for name in names}
    values = {name: value + round(times * (value - getattr(half, name))) for name, value in values.items()}
    values["steps"] += -values["steps"] % accumulation
    return dataclasses.replace(whole, **values, exact=False)
