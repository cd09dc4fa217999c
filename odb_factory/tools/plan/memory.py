"""Host memory that the windows take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.core.sample import SampleMeta


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory as the run counts it: processed samples, pickled, in the compute dtype."""

    mean_bytes: float
    """Of a sample."""
    most_bytes: int
    samples: int
    """A rank's share of the dataset."""
    ranks_per_host: int
    bound: int | None
    """Byte limit of a rank's window: `odb_window_bytes`, or its default on this host; None: no limit."""
    bound_is_given: bool
    """Whether the recipe sets `bound`."""

    def window(self, depth: int) -> float:
        """Bytes of one rank's window of at most `depth` samples, within the limit."""
        full = min(depth, self.samples) * self.mean_bytes
        return full if self.bound is None else min(full, max(self.bound, self.mean_bytes))

    def host(self, depth: int) -> float:
        """Bytes of the windows of all ranks on a host."""
        return self.window(depth) * self.ranks_per_host

    def fits(self, depth: int) -> bool:
        """Whether a full window stays within the limit."""
        return self.bound is None or min(depth, self.samples) * self.mean_bytes <= self.bound


def measure_memory(
    metas: Sequence[SampleMeta], *, samples: int, ranks_per_host: int, bound: int | None, bound_is_given: bool
) -> Memory:
    """The memory for samples like `metas`; for the other arguments see `Memory`."""
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
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 10 else f"{count:,.1f} {unit}"
