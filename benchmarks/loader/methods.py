"""The loaders that are compared, each as an iterator over (batch, whether it is a filler)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from benchmarks.loader.kinds import collate

METHODS = ("plain", "public", "odb")
PUBLIC_PREFETCH = 64
"""What the public package's README shows: samples in flight for each worker, all of which form its window."""

Batches = Iterator[tuple[dict[str, Any], bool]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the loaders are set up."""

    workers: int
    batch_size: int
    """Of the plain loader."""
    budget: int
    """Padded tokens of a group, at most."""
    depth: int
    """Window of `OdbDataLoader` (samples)."""
    seed: int


class Holding(Dataset[Any]):
    """A data set as the public package needs it with a current torch.

    Workers of torch 2.14 take the data set out of a list by `pop`. The public package 0.1.2 starts torch's worker
    function itself and hands it the bare data set, so that each worker fails: this one's `pop` gives itself.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def pop(self) -> Holding:
        return self


def available(method: str) -> bool:
    """Whether the loader is installed."""
    return method != "public" or importlib.util.find_spec("odb") is not None


def batches(method: str, data: Dataset[Any], setting: Setting) -> Batches:
    """One epoch of this rank. The loader is made when the first batch is asked for, and closed at the end."""
    return {"plain": _plain, "public": _public, "odb": _ours}[method](data, setting)


def _plain(data: Dataset[Any], setting: Setting) -> Batches:
    loader = DataLoader(
        data,
        batch_size=setting.batch_size,
        sampler=_sampler(data, setting.seed),
        num_workers=setting.workers,
        collate_fn=collate,
    )
    for batch in loader:
        yield batch, False


def _public(data: Dataset[Any], setting: Setting) -> Batches:
    import odb

    loader = odb.ODBDataLoader(
        Holding(data),
        token_budget=setting.budget,
        batch_size=1,
        sampler=_sampler(data, setting.seed),
        num_workers=setting.workers,
        prefetch_factor=PUBLIC_PREFETCH,
        collate_fn=collate,
        loss_scaling="exact",
    )
    for batch in loader:
        odb.pop_step_info(batch, loss_scaling="exact")
        yield batch, False


def _ours(data: Dataset[Any], setting: Setting) -> Batches:
    from odb_factory import OdbConfig, OdbDataLoader

    config = OdbConfig(token_budget=setting.budget, depth=setting.depth, seed=setting.seed)
    with OdbDataLoader(data, collate, config, num_workers=setting.workers) as loader:
        for batch, info in loader:
            yield batch, info.idle


def _sampler(data: Any, seed: int) -> Sampler[int]:
    """A random order, and of several ranks each its part."""
    import torch

    if dist.is_initialized():
        return DistributedSampler(data, shuffle=True, seed=seed)
    return RandomSampler(data, generator=torch.Generator().manual_seed(seed))
