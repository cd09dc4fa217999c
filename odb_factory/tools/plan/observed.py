"""The measured samples, and an epoch made from them."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.tools.plan.recipe import RecipeError

SHORT_OF_MEAN = 0.5
"""A sample below this fraction of the mean length is short: in a mixed batch, most of its row is padding."""

BINS = 30


class RunWouldFail(RecipeError):
    """A run would fail before its first step because it has no samples, so there is nothing to plan."""


@dataclass(frozen=True)
class Observed:
    """The result of passing a random selection of rows through the recipe's pipeline."""

    size: int
    """Number of rows in the training split."""
    metas: tuple[SampleMeta, ...]
    """The usable samples, by index."""
    dropped: tuple[Dropped, ...]
    """The other samples, by index."""

    @property
    def read(self) -> int:
        """Number of rows read."""
        return len(self.metas) + len(self.dropped)

    @property
    def complete(self) -> bool:
        """Whether every row was measured."""
        return self.read == self.size

    @property
    def error_of_mean(self) -> float | None:
        """Two standard errors of the mean length, relative to it: the error of figures proportional to it.

        None if there is only one sample.
        """
        if self.complete:
            return 0.0
        if len(self.metas) < 2:
            return None
        lengths = [meta.length for meta in self.metas]
        left_out = 1 - self.read / self.size
        return 2 * statistics.stdev(lengths) * (left_out / len(lengths)) ** 0.5 / statistics.fmean(lengths)

    @property
    def bad(self) -> tuple[Dropped, ...]:
        """The dropped samples that end a run with `odb_on_bad_sample: raise`."""
        return tuple(d for d in self.dropped if d.bad)

    def reasons(self) -> dict[str, int]:
        """The number of dropped samples by reason."""
        return dict(sorted(Counter(d.reason for d in self.dropped).items()))


@dataclass(frozen=True)
class EpochSamples:
    """An epoch: `samples[i].index == i`; those in `dropped` are never emitted."""

    samples: tuple[SampleMeta, ...]
    dropped: frozenset[int]
    exact: bool
    """Whether they are the dataset itself."""

    @property
    def usable(self) -> list[SampleMeta]:
        """The emitted samples, in dataset order."""
        return [s for s in self.samples if s.index not in self.dropped]


def make_epoch(observed: Observed, size: int, seed: int) -> EpochSamples:
    """`size` samples like those observed: the dataset itself if all of it was measured, else resampled.

    Resampling uses each observed row equally often (a random part once more if `size` is not a multiple), which has a
    lower variance than independent draws.
    """
    blank = SampleMeta(index=0, length=1, loss_tokens=0)
    rows: list[SampleMeta | None] = [*observed.metas, *([None] * len(observed.dropped))]
    exact = observed.complete and size == observed.size
    if exact:
        known = {meta.index: meta for meta in observed.metas}
        rows = [known.get(index) for index in range(size)]
    else:
        rng = random.Random(f"{seed}:epoch of a sample")
        rows = rows * (size // len(rows)) + rng.sample(rows, size % len(rows))
        rng.shuffle(rows)
    return EpochSamples(
        tuple(replace(meta or blank, index=index) for index, meta in enumerate(rows)),
        frozenset(index for index, meta in enumerate(rows) if meta is None),
        exact,
    )


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Statistics of the observed lengths (tokens, after template, truncation and visual expansion)."""

    mean: float
    sd: float
    least: int
    median: float
    p90: float
    p99: float
    most: int
    short: float
    """Share below `SHORT_OF_MEAN` x mean."""
    truncated: float
    """Share at the cutoff."""
    above_cutoff: float
    """Share above the cutoff (efficient_eos and visual tokens may add some after it)."""
    with_media: float
    above_budget: float
    """Share whose padded length exceeds the budget."""
    loss_share: float
    """Mean share of supervised tokens in a sample."""
    loss_share_sd: float

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation / mean."""
        return self.sd / self.mean


def describe_lengths(metas: Sequence[SampleMeta], *, cutoff: int, overlong: Sequence[bool]) -> Lengths:
    """Statistics of at least one sample; `overlong` says for each whether it exceeds the budget."""
    lengths = np.array([meta.length for meta in metas])
    loss_shares = np.array([meta.loss_tokens for meta in metas]) / lengths
    mean = float(lengths.mean())
    median, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99)).tolist()
    return Lengths(
        mean=mean,
        sd=float(lengths.std()),
        least=int(lengths.min()),
        median=median,
        p90=p90,
        p99=p99,
        most=int(lengths.max()),
        short=float(np.mean(lengths < SHORT_OF_MEAN * mean)),
        truncated=float(np.mean(lengths >= cutoff)),
        above_cutoff=float(np.mean(lengths > cutoff)),
        with_media=float(np.mean([meta.has_media for meta in metas])),
        above_budget=float(np.mean(overlong)),
        loss_share=float(loss_shares.mean()),
        loss_share_sd=float(loss_shares.std()),
    )


def histogram(lengths: Sequence[int], bins: int = BINS) -> tuple[list[int], list[int]]:
    """Edges (at most bins + 1, from 0 up, of one width) and counts; bin i holds edges[i] <= length < edges[i + 1].

    The last bin holds the longest length.
    """
    width = max(1, -(-(max(lengths) + 1) // bins))
    counts = np.bincount(np.asarray(lengths) // width)
    return [i * width for i in range(len(counts) + 1)], counts.tolist()
