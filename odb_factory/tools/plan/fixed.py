"""The fixed batches of stock LLaMA-Factory: Standard, Sorted (`group_by_length`) and packing."""

from __future__ import annotations

from collections.abc import Sequence

from odb_factory.core.budget import ceil_multiple, padded_work
from odb_factory.core.sample import SampleMeta
from odb_factory.tools.plan.prediction import Prediction, padded_and_slowest, useful_work

Batches = list[list[list[int]]]
"""[step][rank]: positions of the samples in a micro-batch, in order."""


def deal(order: Sequence[int], batch_size: int, world_size: int) -> Batches:
    """Batches as accelerate distributes them: consecutive, round-robin over the ranks.

    With several ranks every micro-batch is full and every rank gets the same number: the first samples are repeated at
    the end. With one rank the last micro-batch may be smaller.
    """
    order = list(order)
    if world_size > 1 and order:
        first = order[: batch_size * world_size]
        missing = -len(order) % (batch_size * world_size)
        order += (first * (missing // len(first) + 1))[:missing]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[start : start + world_size] for start in range(0, len(batches), world_size)]


def row_length(batch: Sequence[SampleMeta], *, multiple: int, dummy_tokens: int) -> int:
    """Row length (tokens) that the stock collator gives a micro-batch; it adds its dummy image to the first row."""
    longest = max(sample.length for sample in batch)
    if dummy_tokens and not any(sample.has_media for sample in batch):
        longest = max(longest, batch[0].length + dummy_tokens)
    return ceil_multiple(longest, multiple)


def random_order(size: int, seed: int) -> list[int]:
    """The order of Standard's first epoch: accelerate's seeded permutation."""
    import torch

    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def sorted_order(lengths: Sequence[int], group: int, seed: int) -> list[int]:
    """The order of `group_by_length`, from transformers' own function: sorted within mega-batches of a random order.

    Args:
        group: per_device_train_batch_size x gradient_accumulation_steps, as Trainer passes it.
    """
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    order: list[int] = get_length_grouped_indices(list(lengths), group, generator=generator)
    return order


def predict_fixed(
    method: str,
    samples: Sequence[SampleMeta],
    order: Sequence[int],
    *,
    batch_size: int,
    world_size: int,
    accumulation: int,
    multiple: int,
    dummy_tokens: int,
    attention_length: int | None = None,
    exact: bool,
) -> Prediction:
    """One epoch of batches of `batch_size` samples in `order` (positions in `samples`)."""
    batches = deal(order, batch_size, world_size)

    def padded_and_work(batch: Sequence[int]) -> tuple[int, int]:
        width = row_length([samples[i] for i in batch], multiple=multiple, dummy_tokens=dummy_tokens)
        return width * len(batch), padded_work(len(batch), width, attention_length)

    padded, slowest = padded_and_slowest([[padded_and_work(batch) for batch in step] for step in batches])
    emitted = [i for step in batches for batch in step for i in batch]
    return Prediction(
        method=method,
        world_size=world_size,
        batch_size=batch_size,
        samples=len(emitted),
        useful_work=useful_work((sample.length for sample in samples), attention_length),
        tokens=sum(samples[i].length for i in emitted),
        padded_tokens=padded,
        slowest_work=slowest,
        steps=len(batches),
        updates=-(-len(batches) // accumulation),
        exact=exact,
    )


def predict_packing(
    samples: Sequence[SampleMeta],
    *,
    cutoff: int,
    rows_at_once: int,
    batch_size: int,
    world_size: int,
    accumulation: int,
    multiple: int,
    attention_length: int | None = None,
) -> Prediction:
    """Packing into rows of `cutoff` tokens by LLaMA-Factory's own knapsack: an upper bound on its speed.

    Attention is counted per sample, unpadded, as if rows with equal attention work met in a step.
    LLaMA-Factory lowers the cutoff by one when it packs, and pads every row to one more than that.

    Args:
        cutoff: cutoff_len of the recipe; a sample at it (truncated) loses one more token.
        rows_at_once: preprocessing_batch_size; each such part of the dataset is packed separately.
    """
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    width = ceil_multiple(cutoff, multiple)
    rows = []
    """The work of each row."""
    capacity = cutoff - 1
    kept = [min(sample.length, capacity) for sample in samples if sample.length <= cutoff]  # stock drops the others
    for start in range(0, len(kept), rows_at_once):
        for row in greedy_knapsack(kept[start : start + rows_at_once], capacity):
            rows.append(width + useful_work(row, attention_length) - sum(row))
    batches = deal(range(len(rows)), batch_size, world_size)
    padded, slowest = padded_and_slowest(
        [[(width * len(batch), sum(rows[i] for i in batch)) for batch in step] for step in batches]
    )
    return Prediction(
        method="packing",
        world_size=world_size,
        batch_size=batch_size,
        samples=len(kept),
        useful_work=useful_work(kept, attention_length),
        tokens=sum(kept),
        padded_tokens=padded,
        slowest_work=slowest,
        steps=len(batches),
        updates=-(-len(batches) // accumulation),
        exact=False,
    )
