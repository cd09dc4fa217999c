"""Token-budget batching that knows all lengths before the epoch: GMT over the whole data set, BMT inside buckets.

The paper gives only the names of these oracles. Our reading: GMT sorts globally, BMT inside buckets of a random order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.batchers.micro import filler, padded
from benchmarks.epochs import Epoch
from odb_factory.core.budget import ceil_multiple


def gmt(lengths: Sequence[int], *, world: int, budget: int, seed: int = 0, multiple: int = 8) -> Epoch:
    """Sort all samples, cut greedily under the budget, shuffle the batches, deal them to the ranks in turn.

    The last step is completed by fillers (one row of the shortest sample) on the ranks that have no batch for it.
    """
    return _shuffled(_greedy(range(len(lengths)), lengths, budget, multiple), lengths, world, seed, multiple)


def bmt(
    lengths: Sequence[int], *, world: int, budget: int, bucket_size: int, seed: int = 0, multiple: int = 8
) -> Epoch:
    """As `gmt` inside each bucket of `bucket_size` samples of a random order; batches of all buckets are shuffled."""
    order = list(range(len(lengths)))
    random.Random(f"buckets:{seed}").shuffle(order)
    buckets = (order[start : start + bucket_size] for start in range(0, len(order), bucket_size))
    batches = [batch for bucket in buckets for batch in _greedy(bucket, lengths, budget, multiple)]
    return _shuffled(batches, lengths, world, seed, multiple)


def _greedy(samples: Sequence[int], lengths: Sequence[int], budget: int, multiple: int) -> list[list[int]]:
    """From long to short; a batch is closed when the next sample would exceed the budget."""
    batches: list[list[int]] = []
    width = 0
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        if not batches or width * (len(batches[-1]) + 1) > budget:
            batches.append([])
            width = ceil_multiple(lengths[i], multiple)
        batches[-1].append(i)
    return batches


def _shuffled(batches: list[list[int]], lengths: Sequence[int], world: int, seed: int, multiple: int) -> Epoch:
    random.Random(f"batches:{seed}").shuffle(batches)
    micros = [padded(batch, lengths, multiple) for batch in batches]
    micros += [filler(min(lengths), multiple)] * (-len(micros) % world)
    steps = (tuple(micros[start : start + world]) for start in range(0, len(micros), world))
    return Epoch(tuple(steps), tuple(lengths))
