"""v1's own batching strategies, run by its own functions on samples that have nothing but a length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.batchers.micro import padded
from benchmarks.epochs import Epoch, Micro


def normal(lengths: Sequence[int], *, world: int, batch_size: int, seed: int) -> Epoch:
    """`batching_strategy: normal`: `batch_size` samples a micro-batch; what does not fill a step is left out."""
    orders = _orders(lengths, world, seed)
    steps = len(orders[0]) // batch_size
    ranks = [
        [padded(order[k * batch_size : (k + 1) * batch_size], lengths, 1) for k in range(steps)] for order in orders
    ]
    return Epoch(tuple(zip(*ranks, strict=True)), tuple(lengths))


def dynamic_batching(lengths: Sequence[int], *, world: int, batch_size: int, cutoff: int, seed: int) -> Epoch:
    """`batching_strategy: dynamic_batching`, with the fewest `max_steps` that train on every sample of its sampler.

    It has no epochs: a rank whose samples are used up begins again, while others still have some.
    """
    ranks = [_micro_batches(order, lengths, batch_size, cutoff) for order in _orders(lengths, world, seed)]
    steps: list[tuple[Micro, ...]] = []
    wanted = len(lengths) // world
    seen: list[set[int]] = [set() for _ in range(world)]
    while any(len(samples) < wanted for samples in seen):
        step = tuple(next(rank) for rank in ranks)
        for samples, micro in zip(seen, step, strict=True):
            samples.update(micro.samples)
        steps.append(step)
    return Epoch(tuple(steps), tuple(lengths))


def _orders(lengths: Sequence[int], world: int, seed: int) -> list[list[int]]:
    """What the sampler of v1's `BatchGenerator` gives to each rank."""
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return [
        list(StatefulDistributedSampler(lengths, world, rank, shuffle=True, seed=seed, drop_last=True))
        for rank in range(world)
    ]


def _micro_batches(order: Sequence[int], lengths: Sequence[int], batch_size: int, cutoff: int) -> Iterator[Micro]:
    from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin, _get_dynamic_micro_batch_sizes
    from llamafactory.v1.utils.objects import StatefulBuffer

    strategy = BatchingPlugin("dynamic_batching")
    info = {"micro_batch_size": batch_size, "num_micro_batch": 1, "cutoff_len": cutoff}
    buffer = StatefulBuffer()
    endless = itertools.cycle(order)  # the sampler gives the same order each time, as long as nobody sets an epoch

    def next_samples(restart: bool) -> list[dict[str, object]]:
        index = next(endless)
        return [{"input_ids": range(lengths[index]), "index": index}]

    while True:
        strategy.fill_buffer(buffer, info, next_samples)
        (size,) = _get_dynamic_micro_batch_sizes(buffer.samples, info)
        yield padded([sample["index"] for sample in buffer.get(size)], lengths, 1)
