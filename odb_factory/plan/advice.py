"""What to do: budget, depth, and whether Online Dynamic Batching is worth it for the data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.core.budget import ceil_multiple
from odb_factory.core.sample import SampleMeta
from odb_factory.plan.compare import Comparison
from odb_factory.plan.observed import Lengths
from odb_factory.plan.prediction import Prediction

WORTH_IT = 1.15
"""Predicted gain over Standard from which on ODB is plainly worth it."""
SMALL_GAIN = 1.05
"""Below this it is not."""
EVEN = 0.25
"""Coefficient of variation below which lengths count as nearly equal."""
LITTLE_LOST = 0.8
"""Share of ideal time from which on Standard itself loses little."""
LOWER_BUDGETS = (1.0, 0.5, 0.25, 0.125)
"""Budgets that may be recommended instead of the recipe's, as multiples of it."""
WORTH_A_SMALLER = 0.9
"""The recipe's budget is kept if it reaches this part of the share of ideal time that the best of them has."""
RAISE_FROM = 0.01
"""Change of the share of ideal time from which on a larger budget is recommended for its own sake."""
NEAR_BEST = 0.99
"""A smaller depth is as good if it reaches this part of the best depth's share of ideal time."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Host memory that the windows hold, as the run counts it: pickled samples, processed and in the compute dtype."""

    mean_bytes: float
    """Of a sample."""
    most_bytes: int
    ranks_per_host: int
    bound: int | None
    """Bytes of a rank's window, at most: `odb_window_bytes`, or its default on this host; None: no bound."""
    bound_is_given: bool
    """The recipe sets it."""

    def window(self, depth: int) -> float:
        """Bytes of one rank's full window."""
        return depth * self.mean_bytes

    def host(self, depth: int) -> float:
        """Bytes of the windows of all ranks of a host."""
        return self.window(depth) * self.ranks_per_host

    def fits(self, depth: int) -> bool:
        """Whether a full window keeps within the bound."""
        return self.bound is None or self.window(depth) <= self.bound


def measure_memory(
    metas: Sequence[SampleMeta], *, ranks_per_host: int, bound: int | None, bound_is_given: bool
) -> Memory:
    """The memory of samples like `metas`."""
    sizes = [meta.nbytes for meta in metas]
    return Memory(
        mean_bytes=statistics.fmean(sizes),
        most_bytes=max(sizes),
        ranks_per_host=ranks_per_host,
        bound=bound,
        bound_is_given=bound_is_given,
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation, with its reasons in sentences."""

    budget: int
    budget_reason: str
    depth: int
    depth_reason: str
    prediction: Prediction
    """ODB with both."""
    gain: float
    """Predicted time of Standard / that of ODB, by share of ideal time."""
    verdict: str
    """`worth it`, `small gain` or `not worth it`."""
    verdict_reason: str


def advise(
    comparison: Comparison,
    own: Prediction,
    standard: Prediction,
    sorted_: Prediction,
    *,
    lengths: Lengths,
    memory: Memory,
    multiple: int,
    budget_name: str,
) -> Advice:
    """Recommend.

    Args:
        own: ODB at the recipe's budget and depth.
        multiple: lengths are padded to a multiple of this (tokens).
        budget_name: what the recipe's budget is, for the reason.
    """
    depth, depth_reason = _advise_depth(comparison.depths(), memory)
    budget, budget_reason = _advise_budget(comparison, own, depth, lengths, multiple, budget_name)
    best = comparison.online(budget, depth)
    gain = best.ideal_share / standard.ideal_share
    verdict = "worth it" if gain >= WORTH_IT else "small gain" if gain >= SMALL_GAIN else "not worth it"
    return Advice(
        budget=budget,
        budget_reason=budget_reason,
        depth=depth,
        depth_reason=depth_reason,
        prediction=best,
        gain=gain,
        verdict=verdict,
        verdict_reason=_reason(verdict, gain, best, standard, sorted_, lengths),
    )


def _advise_budget(
    comparison: Comparison, own: Prediction, depth: int, lengths: Lengths, multiple: int, name: str
) -> tuple[int, str]:
    """The recipe's, unless a sample is longer, or padding costs too much of what it is for."""
    assert own.budget is not None
    longest = ceil_multiple(lengths.most, multiple)
    if longest > own.budget:
        return longest, (
            f"the longest sample takes {longest:,} padded tokens, more than {name} ({own.budget:,}) allows: it would "
            "be alone, and above it"
        )
    shares = {
        budget: comparison.online(budget, depth).ideal_share
        for factor in LOWER_BUDGETS
        if (budget := round(own.budget * factor)) >= longest
    }
    best = max(shares.values())
    chosen = next(budget for budget, share in shares.items() if share >= WORTH_A_SMALLER * best)
    if chosen < own.budget:
        return chosen, (
            f"{name} ({own.budget:,}) wants more samples a step than the windows of this data can match in length: "
            f"share of ideal time {shares[own.budget]:.3f}, with this budget {shares[chosen]:.3f}"
        )
    twice = comparison.online(2 * own.budget, depth).ideal_share / shares[own.budget] - 1
    reason = f"{name}; twice as much would change the share of ideal time by {twice:+.1%}"
    if twice >= RAISE_FROM:
        return own.budget, f"{reason}: raise it if the accelerator's memory allows"
    return own.budget, f"{reason}, but larger steps keep an accelerator busier, which this model does not see"


def _advise_depth(depths: Sequence[Prediction], memory: Memory) -> tuple[int, str]:
    fitting = [p for p in depths if p.depth is not None and memory.fits(p.depth)]
    best = max(p.ideal_share for p in fitting or depths[:1])
    chosen = next(p for p in fitting or depths if p.ideal_share >= NEAR_BEST * best)
    assert chosen.depth is not None
    shares = ", ".join(f"{p.depth}: {p.ideal_share:.3f}" for p in depths)
    reason = f"the smallest within 1 % of the best share of ideal time ({shares})"
    if not fitting:
        reason = (
            "even the smallest that was tried fills the window's bytes; raise odb_window_bytes, or use fewer pixels"
        )
    elif len(fitting) < len(depths):
        reason += f"; above {fitting[-1].depth} the window's bytes bind"
    return chosen.depth, reason


def _reason(
    verdict: str, gain: float, best: Prediction, standard: Prediction, sorted_: Prediction, lengths: Lengths
) -> str:
    data = f"length CV {lengths.cv:.2f}, {lengths.short:.0%} short samples"
    text = f"{gain:.2f}x of Standard's speed by this model ({data})"
    if verdict == "not worth it":
        if lengths.cv < EVEN:
            return f"the lengths differ too little: {text}"
        if standard.ideal_share > LITTLE_LOST:
            lost = f"{1 - standard.ideal_share:.0%}"
            return f"with its batch size, Standard loses only {lost} of its time to padding and waiting: {text}"
        return f"the epoch is too short for windows in which samples of like length meet: {text}"
    if sorted_.ideal_share >= best.ideal_share:
        text += "; Sorted would come out as well, but needs all lengths in advance and trains on one length at a time"
    return text
