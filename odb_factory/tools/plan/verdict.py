"""Whether Online Dynamic Batching is worth it for the data, and why; or that it cannot be told."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.tools.plan.observed import Lengths, Observed
from odb_factory.tools.plan.prediction import Prediction, ranks_in_words

WORTH_IT = 1.15
"""Predicted gain over Standard from which on ODB is plainly worth it."""
SMALL_GAIN = 1.05
"""Below this it is not."""
EVEN = 0.25
"""Coefficient of variation below which lengths count as nearly equal."""
LITTLE_LOST = 0.8
"""Share of ideal time from which on Standard itself loses little."""
LEAST_STEPS = 4
"""Steps of Standard that an epoch has at least for a verdict: with fewer, its ends are all there is."""
LEAST_SAMPLES = 16
"""Samples that an epoch has, and that were measured, at least for a verdict."""
MOST_BAD = 0.1
"""Share of bad samples above which the others say nothing of the data."""
FEW_STEPS = 8
"""An epoch of fewer steps of ODB is short."""


@dataclass(frozen=True)
class Verdict:
    """What to think of ODB for the data."""

    name: str
    """`worth it`, `small gain`, `not worth it` or `cannot tell`."""
    reason: str


def judge(
    best: Prediction, standard: Prediction, sorted_: Prediction, *, lengths: Lengths, observed: Observed
) -> Verdict:
    """Of ODB at the advised budget and depth (`best`) against Standard."""
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
            "mend what the warning names, then plan again"
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
            f"with the whole data set, which should have {least} or more, or with fewer ranks"
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
        text += "; Sorted would come out as well, but needs all lengths in advance and trains on one length at a time"
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
