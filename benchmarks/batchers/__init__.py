"""Every way of batching as a function from lengths to an epoch of all ranks; `METHODS` has them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.batchers.fixed import packing, sorted_, standard
from benchmarks.batchers.offline import bmt, gmt
from benchmarks.batchers.online import odb, paper
from benchmarks.batchers.peer import is_installed as public_is_installed
from benchmarks.batchers.peer import public
from benchmarks.epochs import Epoch

__all__ = [
    "METHODS",
    "Settings",
    "bmt",
    "gmt",
    "odb",
    "packing",
    "paper",
    "public",
    "public_is_installed",
    "sorted_",
    "standard",
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the methods of one comparison share; each takes what it knows of it."""

    world: int
    budget: int
    """Padded tokens of a micro-batch, at most."""
    depth: int
    """Samples that a rank holds to choose from, of those methods that form batches as they go."""
    batch_size: int
    """Samples of a micro-batch of Standard and Sorted."""
    cutoff: int
    """No sample is longer (tokens); packed rows are that long."""
    seed: int = 0
    multiple: int = 8
    """Rows are padded to a multiple of this (tokens), as LLaMA-Factory does."""
    attention_length: int | None = None
    """See `OdbConfig`; of ours."""

    @property
    def rows(self) -> int:
        """Rows of `cutoff` tokens that the budget holds, at least one: packing's batch size."""
        return max(1, self.budget // self.cutoff)


def _common(s: Settings) -> dict[str, int]:
    return {"world": s.world, "seed": s.seed, "multiple": s.multiple}


METHODS: dict[str, Callable[[Sequence[int], Settings], Epoch]] = {
    "standard": lambda lengths, s: standard(lengths, batch_size=s.batch_size, **_common(s)),
    "sorted": lambda lengths, s: sorted_(lengths, batch_size=s.batch_size, **_common(s)),
    "packing": lambda lengths, s: packing(lengths, cutoff=s.cutoff, rows_per_batch=s.rows, **_common(s)),
    "gmt": lambda lengths, s: gmt(lengths, budget=s.budget, **_common(s)),
    "bmt": lambda lengths, s: bmt(lengths, budget=s.budget, bucket_size=s.world * s.depth, **_common(s)),
    "paper": lambda lengths, s: paper(lengths, depth=s.depth, budget=s.budget, **_common(s)),
    "public": lambda lengths, s: public(lengths, depth=s.depth, budget=s.budget, **_common(s)),
    "odb": lambda lengths, s: odb(
        lengths, depth=s.depth, budget=s.budget, attention_length=s.attention_length, **_common(s)
    ),
}
"""`bmt` has buckets of as many samples as the windows of all ranks hold together: the same choice, lengths known."""
