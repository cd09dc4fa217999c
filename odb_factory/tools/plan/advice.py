"""The recommendation: a token budget, a depth, and whether Online Dynamic Batching is worth it for the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.tools.plan.compare import Comparison
from odb_factory.tools.plan.memory import Memory, size
from odb_factory.tools.plan.observed import Lengths, Observed
from odb_factory.tools.plan.prediction import Prediction, ranks_in_words

WORTH_IT = 1.15
"""ODB is clearly worth it from this predicted gain over Standard."""
SMALL_GAIN = 1.05
"""Below this gain it is not."""
EVEN = 0.25
"""Coefficient of variation below which lengths count as nearly equal."""
LITTLE_LOST = 0.8
"""From this share of ideal time, Standard itself loses little."""
LEAST_STEPS = 4
"""Fewest steps of Standard in an epoch for a verdict: a shorter epoch is all beginning and end."""
LEAST_SAMPLES = 16
"""Fewest samples in an epoch, and fewest measured samples, for a verdict."""
MOST_BAD = 0.1
"""Above this share of bad samples, the others say nothing about the data."""
FEW_STEPS = 8
"""An epoch with fewer steps of ODB counts as short."""


@dataclass(frozen=True)
class Verdict:
    """Whether ODB is worth it for the data."""

    name: str
    """`worth it`, `small gain`, `not worth it` or `cannot tell`."""
    reason: str


def judge(
    best: Prediction, standard: Prediction, sorted_: Prediction, *, lengths: Lengths, observed: Observed
) -> Verdict:
    """Judge ODB at the recommended budget and depth (`best`) against Standard."""
    unknown = _cannot_tell(standard, observed)
    if unknown is not None:
        return Verdict("cannot tell", unknown)
    gain = best.gain_over(standard)
    name = "worth it" if gain >= WORTH_IT else "small gain" if gain >= SMALL_GAIN else "not worth it"
    reason = _reason(name, gain, best, standard, sorted_, lengths)
    if observed.bad:
        reason += f"; the {len(observed.bad)} bad samples, at which stock LLaMA-Factory stops, are left out of it"
    return Verdict(name, reason)


def _cannot_tell(standard: Prediction, observed: Observed) -> str | None:
    seen = len(observed.metas) + len(observed.dropped)
    if len(observed.bad) > MOST_BAD * seen:
        return (
            f"{len(observed.bad)} of the {seen} rows that were read are bad, so a run would not train on this data; "
            "fix what the warning names, then plan again"
        )
    if len(observed.metas) < min(LEAST_SAMPLES, observed.size):
        return (
            f"the number of usable samples that were measured, {len(observed.metas)}, is too small to tell; plan with "
            "more --samples"
        )
    usable = round(len(observed.metas) / seen * observed.size)
    least = max(LEAST_SAMPLES, LEAST_STEPS * (standard.batch_size or 1) * standard.world_size)
    if usable < least:
        return (
            f"an epoch of {usable} usable samples on {ranks_in_words(standard.world_size)} is too little to tell; plan "
            f"with the whole dataset, which should have {least} or more, or with fewer ranks"
        )
    return None


def _reason(
    name: str, gain: float, best: Prediction, standard: Prediction, sorted_: Prediction, lengths: Lengths
) -> str:
    data = f"length CV {lengths.cv:.2f}, {lengths.short:.0%} short samples"
    text = f"{gain:.2f}x of Standard's speed by this model ({data})"
    if name == "not worth it":
        return f"{_why_not(best, standard, lengths)}: {text}"
    if sorted_.ideal_share >= best.ideal_share:
        text += "; Sorted would be as fast, but needs all lengths in advance and trains on one length at a time"
    return text


def _why_not(best: Prediction, standard: Prediction, lengths: Lengths) -> str:
    if lengths.cv < EVEN:
        return "the lengths differ too little"
    if standard.ideal_share > LITTLE_LOST:
        lost = f"{1 - standard.ideal_share:.0%}"
        return f"with its batch size, Standard loses only {lost} of its time to padding and waiting"
    if best.short_windows:
        return "odb_window_bytes keeps the windows too small for samples of like length to meet"
    if best.steps < FEW_STEPS:
        return "the epoch is too short for windows in which samples of like length meet"
    return "no budget and depth that were tried bring samples of like length together"


WORTH_A_SMALLER = 0.9
"""Keep the recipe's budget if it reaches this fraction of the best budget's share of ideal time."""
RAISE_FROM = 0.01
"""From this relative gain in the share of ideal time, a larger budget is recommended for its own sake."""
NEAR_BEST = 0.99
"""A smaller depth is as good if it reaches this fraction of the best depth's share of ideal time."""
STARVED = 1.05
"""If lifting the window's byte limit multiplies the samples per step by this, that limit keeps steps small."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation, with its reasons as sentences."""

    budget: int
    budget_reason: str
    depth: int
    depth_reason: str
    prediction: Prediction
    """ODB with both."""
    gain: float
    """Predicted speed of ODB relative to Standard, by share of ideal time."""
    verdict: str
    """`worth it`, `small gain`, `not worth it` or `cannot tell`."""
    verdict_reason: str


def advise(
    comparison: Comparison,
    own: Prediction,
    standard: Prediction,
    sorted_: Prediction,
    *,
    observed: Observed,
    lengths: Lengths,
    memory: Memory,
    budget_name: str,
) -> Advice:
    """Recommend a budget (at the deepest window that fits) and a depth at that budget, and judge the result.

    Args:
        own: ODB at the recipe's budget and depth.
        budget_name: how to call the recipe's budget in the reason.
    """
    assert own.budget is not None
    assert own.depth is not None
    deepest = max((depth for depth in comparison.depth_values if memory.fits(depth)), default=own.depth)
    budget, budget_reason = _advise_budget(comparison, own.budget, deepest, memory, budget_name)
    # a window of fewer samples could not fill the budget
    least = min(budget / lengths.mean, observed.size / own.world_size)
    depth, depth_reason = _advise_depth(comparison.depths(budget), own.depth, memory, least)
    best = comparison.online(budget, depth)
    verdict = judge(best, standard, sorted_, lengths=lengths, observed=observed)
    return Advice(
        budget=budget,
        budget_reason=budget_reason,
        depth=depth,
        depth_reason=depth_reason,
        prediction=best,
        gain=best.gain_over(standard),
        verdict=verdict.name,
        verdict_reason=verdict.reason,
    )


def _advise_budget(comparison: Comparison, own: int, depth: int, memory: Memory, name: str) -> tuple[int, str]:
    """The recipe's budget, unless a sample is longer, or a smaller one pads and waits much less.

    Where the byte limit keeps windows short, budgets are compared without it: a smaller budget would not help.
    """
    longest = comparison.longest
    if longest > own:
        return longest, (
            f"the longest sample takes {longest:,} padded tokens, more than {name} ({own:,}) allows: it would be "
            "alone, and above it"
        )
    bounded = comparison.online(own, depth)
    starved = bounded.short_windows > 0
    made = {
        budget: comparison.online(budget, depth, bounded=not starved)
        for budget in candidates(own, longest, comparison.multiple)
    }
    shares = {budget: prediction.ideal_share for budget, prediction in made.items()}
    best = max(shares.values())
    chosen = next(budget for budget, share in shares.items() if share >= WORTH_A_SMALLER * best)
    if chosen < own:
        return chosen, (
            f"{own:,} ({name}) is larger than this data fills evenly, so that its steps would pad and wait: share of "
            f"ideal time {shares[own]:.3f}, with this budget {shares[chosen]:.3f} (at depth {depth:,})"
        )
    held, free = bounded.samples_per_step, made[own].samples_per_step
    if starved and memory.bound is not None and free >= STARVED * held:
        return own, (
            f"{name}; not it, but odb_window_bytes ({size(memory.bound)}) keeps steps small, for windows stay short of "
            f"{depth:,} samples: {held:.1f} samples a step, without that bound {free:.1f}; raise it"
        )
    twice = comparison.online(2 * own, depth).ideal_share / bounded.ideal_share - 1
    reason = f"{name}; twice as much would change the share of ideal time by {twice:+.1%}"
    if twice >= RAISE_FROM:
        return own, f"{reason}: raise it if the accelerator's memory allows"
    return own, f"{reason}, but larger steps keep an accelerator busier, which this model does not see"


def candidates(own: int, longest: int, multiple: int) -> list[int]:
    """The recipe's budget, half of it, and so on down to the longest sample (padded tokens); largest first."""
    budgets = [own]
    while (half := budgets[-1] // 2 // multiple * multiple) >= max(1, longest):
        budgets.append(half)
    return budgets


def _advise_depth(depths: Sequence[Prediction], own: int, memory: Memory, least: float) -> tuple[int, str]:
    """Choose among predictions at one budget, smallest depth first; at least `least` samples if possible."""
    fitting = [p for p in depths if p.depth is not None and memory.fits(p.depth)]
    if not fitting:
        return own, (
            "the recipe's own; even the smallest depth that was tried fills the window's bytes: raise "
            "odb_window_bytes, or use fewer pixels"
        )
    offered = [p for p in fitting if p.depth is not None and p.depth >= least] or fitting[-1:]
    best = max(p.ideal_share for p in offered)
    chosen = next(p for p in offered if p.ideal_share >= NEAR_BEST * best)
    assert chosen.depth is not None
    shares = ", ".join(f"{p.depth}: {p.ideal_share:.3f}" for p in depths)
    reason = f"the smallest within 1 % of the best share of ideal time ({shares})"
    if len(fitting) < len(depths):
        reason += f"; above {fitting[-1].depth} the window's bytes bind"
    return chosen.depth, reason
