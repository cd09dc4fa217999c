"""The loaders of the methods that `benchmarks.train.driver` runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.batchers import bmt, gmt
from benchmarks.loader.methods import Holding
from benchmarks.train.setup import PAD_MULTIPLE

Collate = Callable[[list[Any]], dict[str, Any]]


@dataclass
class Batching:
    """The loader of a rank, and what making it took (seconds)."""

    loader: DataLoader[Any]
    figures: dict[str, float] = field(default_factory=dict)


def make_batching(method: str, trainer: Any, collate: Collate, *, budget: int, depth: int) -> Batching:
    """The loader of `method` for this rank of `trainer`."""
    if method == "public":
        return _public(trainer, collate, budget)
    return _offline(method, trainer, collate, budget, depth)


class _WithFiller(Dataset[Any]):
    """Index -1 - i is sample i without a target: it takes time and weighs nothing."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            return self._samples[index]
        sample = self._samples[-1 - index]
        return sample | {"labels": [-100] * len(sample["labels"])}


def _offline(method: str, trainer: Any, collate: Collate, budget: int, depth: int) -> Batching:
    """GMT and BMT: all lengths are observed first, each rank a share of them; then the epoch is one list of batches."""
    start = time.perf_counter()
    lengths = _observe(trainer)
    seconds = time.perf_counter() - start
    world, rank, seed = trainer.args.world_size, trainer.args.process_index, trainer.args.seed
    common = {"world": world, "budget": budget, "seed": seed, "multiple": PAD_MULTIPLE}
    epoch = gmt(lengths, **common) if method == "gmt" else bmt(lengths, bucket_size=world * depth, **common)
    filler = [-1 - lengths.index(min(lengths))]
    batches = [list(step[rank].samples) or filler for step in epoch.steps]
    loader = DataLoader(_WithFiller(trainer.train_dataset), batch_sampler=batches, **_workers(trainer, collate))
    return Batching(loader, {"length_cache_s": seconds})


def _observe(trainer: Any) -> list[int]:
    """Lengths of all samples: what a length cache has to be filled with before the first step."""
    world, rank = trainer.args.world_size, trainer.args.process_index
    dataset = trainer.train_dataset
    mine = [len(dataset[index]["input_ids"]) for index in range(rank, len(dataset), world)]
    shares: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(shares, mine)
    return [shares[index % world][index // world] for index in range(len(dataset))]


def _public(trainer: Any, collate: Collate, budget: int) -> Batching:
    """The public package: `enable_odb` of its adapter for Trainer, on a plain DataLoader of single samples.

    Its README passes `trainer.get_train_dataloader()`, which it then refuses: a loader that accelerate has prepared has
    a batch sampler and no batch size. Its depth is prefetch_factor x workers. Its random sleep of up to two seconds at
    the start is set to zero, in its favour: in a short run that would weigh more than in a real one.
    """
    from odb.constants import TOTAL_BATCH_SIZE_KEY, TOTAL_TOKENS_KEY
    from odb.integrations.hf import enable_odb

    os.environ["ODB_ITERATOR_STARTUP_JITTER_SEC"] = "0"

    def forwarding(samples: list[Any]) -> dict[str, Any]:
        """Its totals come with the samples, and must be in the batch."""
        return collate(samples) | {key: samples[0][key] for key in (TOTAL_BATCH_SIZE_KEY, TOTAL_TOKENS_KEY)}

    args = trainer.args
    sampler: Any = DistributedSampler(trainer.train_dataset, args.world_size, args.process_index, seed=args.seed)
    loader = DataLoader(Holding(trainer.train_dataset), batch_size=1, sampler=sampler, **_workers(trainer, forwarding))
    enable_odb(
        trainer,
        train_dataloader=loader,
        train_dataset=trainer.train_dataset,
        token_budget=budget,
        loss_scaling="exact",
        join=True,
    )
    return Batching(loader)


def _workers(trainer: Any, collate: Collate) -> dict[str, Any]:
    args = trainer.args
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "collate_fn": collate,
    }
