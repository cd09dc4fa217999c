"""The fixed batches of stock LLaMA-Factory: Standard, Sorted (`group_by_length`), and packing.

Orders and the dealing to ranks are those of `odb_factory.tools.plan.fixed`, which its tests compare with a run of the
stock command: every rank gets as many batches, the first samples of the order come once more at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.batchers.micro import padded
from benchmarks.epochs import Epoch, Micro
from benchmarks.errors import BenchmarkError
from odb_factory.core.budget import ceil_multiple
from odb_factory.tools.plan.fixed import deal, random_order, sorted_order

ROWS_AT_ONCE = 1000
"""LLaMA-Factory's default preprocessing_batch_size: so many samples are packed with each other."""


def standard(lengths: Sequence[int], *, world: int, batch_size: int, seed: int = 0, multiple: int = 8) -> Epoch:
    """Batches of `batch_size` samples in a random order."""
    return _dealt(lengths, random_order(len(lengths), seed), batch_size, world, multiple)


def sorted_(lengths: Sequence[int], *, world: int, batch_size: int, seed: int = 0, multiple: int = 8) -> Epoch:
    """The same in the order of `group_by_length`, which transformers' own function makes."""
    return _dealt(lengths, sorted_order(lengths, batch_size, seed), batch_size, world, multiple)


def _dealt(lengths: Sequence[int], order: Sequence[int], batch_size: int, world: int, multiple: int) -> Epoch:
    steps = (
        tuple(padded(batch, lengths, multiple) for batch in step if batch) for step in deal(order, batch_size, world)
    )
    return Epoch(tuple(steps), tuple(lengths))


def packing(
    lengths: Sequence[int],
    *,
    world: int,
    cutoff: int,
    rows_per_batch: int,
    seed: int = 0,
    multiple: int = 8,
    padding_free: bool = True,
    rows_at_once: int = ROWS_AT_ONCE,
    order: Sequence[int] | None = None,
) -> Epoch:
    """Rows of `cutoff` tokens out of LLaMA-Factory's own knapsack: a bound, whatever attention runs over such rows.

    LLaMA-Factory keeps one token of the cutoff for itself, so a sample at the cutoff loses one more token.

    Args:
        padding_free: attention keeps the samples of a row apart and pays for their own lengths (`neat_packing` with a
            kernel for it); False: for the whole row.
        rows_at_once: samples that are packed with each other.
        order: of the samples in the data; default: a random one. LLaMA-Factory packs in the order of the data.

    Raises:
        BenchmarkError: a sample is longer than `cutoff`; LLaMA-Factory would have cut it off.
    """
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    if max(lengths) > cutoff:
        raise BenchmarkError(f"a sample has {max(lengths)} tokens, more than the cutoff {cutoff}; raise --cutoff.")
    order = random_order(len(lengths), seed) if order is None else order
    rows: list[list[int]] = []
    for start in range(0, len(order), rows_at_once):
        of_length: dict[int, list[int]] = defaultdict(list)
        for i in order[start : start + rows_at_once]:
            of_length[min(lengths[i], cutoff - 1)].append(i)
        kept = [length for length, samples in of_length.items() for _ in samples]
        rows += [[of_length[length].pop() for length in row] for row in greedy_knapsack(kept, cutoff - 1)]
    width = ceil_multiple(cutoff, multiple)

    def micro(batch: Sequence[int]) -> Micro:
        samples = tuple(i for row in batch for i in rows[row])
        squares = sum(lengths[i] ** 2 for i in samples) if padding_free else width * width * len(batch)
        return Micro(samples, width * len(batch), squares)

    dealt = deal(random_order(len(rows), seed), rows_per_batch, world)
    return Epoch(tuple(tuple(micro(batch) for batch in step) for step in dealt), tuple(lengths))
