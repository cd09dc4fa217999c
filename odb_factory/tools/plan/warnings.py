"""Sentences about what a run would leave out, or do otherwise than the table may suggest."""

from __future__ import annotations

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.tools.plan.advice import Advice
from odb_factory.tools.plan.observed import Lengths, Observed
from odb_factory.tools.plan.prediction import Prediction
from odb_factory.tools.plan.stops import bad_samples


def make_warnings(
    config: OdbConfig, observed: Observed, lengths: Lengths, own: Prediction, advice: Advice
) -> list[str]:
    """Of the recipe's own run (`own`)."""
    found = []
    if observed.bad and config.on_bad_sample == "skip":
        found.append(f"{bad_samples(observed)}; a run skips and names them.")
    invalid = len(observed.dropped) - len(observed.bad)
    if invalid:
        found.append(
            f"{invalid} of {observed.read} rows are invalid conversations; they are dropped, as in stock LLaMA-Factory."
        )
    found += _overlong(config, observed, own)
    if not config.join:
        usable = round(len(observed.metas) / observed.read * observed.size)
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


def _overlong(config: OdbConfig, observed: Observed, own: Prediction) -> list[str]:
    """Of samples above the budget that do not end a run."""
    budget = make_budget(config)
    costs = [budget.cost((meta,)) for meta in observed.metas if budget.overlong(meta)]
    if not costs or config.overlong == "error":
        return []
    share = len(costs) / len(observed.metas)
    those = (
        f"{len(costs):,} of the {len(observed.metas):,} samples that were read ({share:.1%}) are longer than the token "
        f"budget {config.token_budget:,}"
    )
    remedy = f"raise odb_token_budget to {max(costs)}, the padded tokens of the longest one, or lower cutoff_len"
    if config.overlong == "drop":
        kept, all_ = own.samples, own.samples + own.overlong
        return [
            f"{those}: they are dropped, and ODB trains on {kept:,} of {all_:,}, so its speed is not compared with "
            f"Standard's; to keep them, {remedy}."
        ]
    return [f"{those}: each is trained on alone, in a micro-batch that takes more memory than the budget; {remedy}."]
