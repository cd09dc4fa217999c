"""Sentences about what a run would stop at, leave out, or do otherwise than the table may suggest."""

from __future__ import annotations

from odb_factory.config import OdbConfig
from odb_factory.plan.advice import Advice
from odb_factory.plan.observed import Lengths, Observed
from odb_factory.plan.prediction import Prediction


def make_warnings(
    config: OdbConfig, observed: Observed, lengths: Lengths, own: Prediction, advice: Advice
) -> list[str]:
    """Of the recipe's own run (`own`)."""
    seen = len(observed.metas) + len(observed.dropped)
    found = []
    if observed.bad:
        found.append(_bad(config, observed, seen))
    invalid = len(observed.dropped) - len(observed.bad)
    if invalid:
        found.append(
            f"{invalid} of {seen} rows are invalid conversations; they are dropped, as in stock LLaMA-Factory."
        )
    if lengths.above_budget:
        fate = "trained on alone, above the budget"
        if config.overlong == "drop":
            kept, all_ = own.samples, own.samples + own.overlong
            fate = f"dropped, and ODB trains on {kept:,} of {all_:,}, so its speed is not compared with Standard's"
        found.append(f"{lengths.above_budget:.1%} of the samples are above the token budget: they are {fate}.")
    if not config.join:
        usable = round(len(observed.metas) / seen * observed.size)
        found.append(
            f"odb_join is false (odb_quota {config.quota:g}): an epoch of ODB emits {own.samples:,} of {usable:,} "
            "samples, so its steps per epoch do not compare with Standard's; speeds are per token."
        )
    taken = config.token_budget / lengths.mean
    if taken >= config.depth and advice.budget >= config.token_budget:
        found.append(
            f"The budget would take about {taken:,.0f} samples of the mean length, and the window holds "
            f"{config.depth}: raise odb_depth, or micro-batches stay below the budget."
        )
    if own.short_windows:
        found.append(
            f"window_bytes keeps windows short of odb_depth {config.depth}: raise odb_window_bytes, or lower odb_depth."
        )
    return found


def _bad(config: OdbConfig, observed: Observed, seen: int) -> str:
    first = observed.bad[0]
    where = f"the first is sample {first.index} ({first.reason}: {first.detail.rstrip('.')})"
    if config.on_bad_sample == "raise":
        what = "a run would stop there; mend it, or set odb_on_bad_sample: skip"
    else:
        what = "a run skips and names them"
        expected = len(observed.bad) * observed.size / seen
        if config.max_bad_samples is not None and expected > config.max_bad_samples:
            what = (
                f"a run would stop after {config.max_bad_samples} (odb_max_bad_samples), about {expected:.0f} are to "
                "be expected; mend the data, or raise that number"
            )
    return f"{len(observed.bad)} of {seen} samples are bad; {where}; {what}."
