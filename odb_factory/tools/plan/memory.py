"""Host memory that the windows hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.core.sample import SampleMeta


@dataclass(frozen=True, kw_only=True)
class Memory:
    """As the run counts it: pickled samples, processed and in the compute dtype."""

    mean_bytes: float
    """Of a sample."""
    most_bytes: int
    samples: int
    """Of the data set that a rank can get hold of, when all have as many."""
    ranks_per_host: int
    bound: int | None
    """Bytes of a rank's window, at most: `odb_window_bytes`, or its default on this host; None: no bound."""
    bound_is_given: bool
    """The recipe sets it."""

    def window(self, depth: int) -> float:
        """Bytes of one rank's window of at most `depth` samples: never more than the bound lets it hold."""
        full = min(depth, self.samples) * self.mean_bytes
        return full if self.bound is None else min(full, max(self.bound, self.mean_bytes))

    def host(self, depth: int) -> float:
        """Bytes of the windows of all ranks of a host."""
        return self.window(depth) * self.ranks_per_host

    def fits(self, depth: int) -> bool:
        """Whether a full window keeps within the bound."""
        return self.bound is None or min(depth, self.samples) * self.mean_bytes <= self.bound


def measure_memory(
    metas: Sequence[SampleMeta], *, samples: int, ranks_per_host: int, bound: int | None, bound_is_given: bool
) -> Memory:
    """The memory of samples like `metas`; for the other arguments see `Memory`."""
    sizes = [meta.nbytes for meta in metas]
    return Memory(
        mean_bytes=statistics.fmean(sizes),
        most_bytes=max(sizes),
        samples=samples,
        ranks_per_host=ranks_per_host,
        bound=bound,
        bound_is_given=bound_is_given,
    )


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 10 else f"{count:,.1f} {unit}"
