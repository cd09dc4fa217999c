"""How each method gets its micro-batches: an iterator of batches and their loss scale, and what comes first."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.data import MadeSamples, Padded, packed
from odb_factory import OdbConfig, OdbDataLoader, SampleMeta
from odb_factory.core.budget import Budget
from odb_factory.core.grouping import group_window
from odb_factory.core.loss_scale import loss_scale

Batches = Iterator[tuple[dict[str, Any], float]]
"""(batch, loss scale)"""


@dataclass(frozen=True, slots=True)
class Feed:
    """One method with its settings."""

    method: str
    budget: int
    """Padded tokens of a micro-batch, at most; Standard: batch size x longest sample."""
    settings: dict[str, int]
    open: Callable[[], contextlib.AbstractContextManager[Batches]]
    """Starts the loader; ends it on leaving."""
    warm_up: tuple[dict[str, Any], ...]
    """Micro-batches to run before measuring, the costliest that is to be expected first."""
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes feeds of one set of samples.

    Args:
        data: the samples; every feed reads each of them once.
        padded: collate function of the methods that pad.
        longest: the profile's cutoff (tokens).
        workers: processes that read samples.
        pin: page-lock batches.
        depth: outstanding depth of ODB, and buffer of the public package.
        seed: of all orders.
    """

    data: MadeSamples
    padded: Padded
    longest: int
    workers: int
    pin: bool
    depth: int
    seed: int

    def standard(self, batch_size: int) -> Feed:
        """Fixed batch size in random order."""
        order = self._order()
        batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        costliest = max(batches, key=lambda batch: max(self._lengths(batch)) * len(batch))
        budget, settings = batch_size * self.longest, {"batch_size": batch_size}
        return self._fixed("standard", budget, settings, batches, self.padded, costliest)

    def packing(self, budget: int) -> Feed:
        """Padding-free rows of at most `budget` real tokens, filled first-fit in random order."""
        batches = first_fit(self._order(), [sample.length for sample in self.data.samples], budget)
        costliest = max(batches, key=lambda batch: sum(self._lengths(batch)))
        return self._fixed("packing", budget, {}, batches, packed, costliest)

    def odb(self, budget: int) -> Feed:
        """Online Dynamic Batching, through the public loader, as its documentation says.

        Without the small windows of the first rounds: an epoch here is so short that they would be most of it.
        """
        config = OdbConfig(token_budget=budget, depth=self.depth, seed=self.seed, ramp=False)

        @contextlib.contextmanager
        def opened() -> Iterator[Batches]:
            with OdbDataLoader(self.data, self.padded, config, num_workers=self.workers, pin_memory=self.pin) as loader:
                yield ((batch, loss_scale(info.loss_tokens, info.global_loss_tokens, 1)) for batch, info in loader)

        return Feed("odb", budget, {}, opened, self._groups(budget), self.depth)

    def public(self, budget: int) -> Feed:
        """The public package `online-dynamic-batching`, applied to a plain DataLoader as its documentation says.

        Without the small windows at its start, either.
        """

        @contextlib.contextmanager
        def opened() -> Iterator[Batches]:
            import odb

            from benchmarks.loader.methods import Holding

            loader = DataLoader(
                Holding(self.data),
                batch_size=1,
                shuffle=True,
                generator=torch.Generator().manual_seed(self.seed),
                num_workers=self.workers,
                prefetch_factor=max(2, self.depth // self.workers),
                pin_memory=self.pin,
                collate_fn=self.padded,
            )
            odb.apply(loader, token_budget=budget, no_warmup=True)
            batches = iter(loader)
            yield ((batch, float(odb.pop_step_info(batch).loss_scale)) for batch in batches if isinstance(batch, dict))

        return Feed("public", budget, {}, opened, self._groups(budget), self.depth)

    def _order(self) -> list[int]:
        return np.random.default_rng(self.seed).permutation(len(self.data)).tolist()

    def _lengths(self, batch: Sequence[int]) -> list[int]:
        return [self.data.samples[index].length for index in batch]

    def _make(self, batch: Sequence[int], collate: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
        return collate([self.data[index] for index in batch])

    def _groups(self, budget: int) -> tuple[dict[str, Any], ...]:
        """The costliest group and the one of most samples, if the whole set were one window."""
        metas = [
            SampleMeta(index=index, length=sample.length, loss_tokens=1)
            for index, sample in enumerate(self.data.samples)
        ]
        groups = group_window(metas, Budget(tokens=budget))
        chosen = (max(groups, key=lambda group: group.cost), max(groups, key=lambda group: len(group.samples)))
        return tuple(self._make([meta.index for meta in group.samples], self.padded) for group in chosen)

    def _fixed(
        self,
        method: str,
        budget: int,
        settings: dict[str, int],
        batches: list[list[int]],
        collate: Callable[[list[Any]], dict[str, Any]],
        costliest: list[int],
    ) -> Feed:
        """Batches that are known beforehand, through a plain DataLoader."""
        warm_up = self._make(costliest, collate)

        @contextlib.contextmanager
        def opened() -> Iterator[Batches]:
            loader = DataLoader(
                self.data,
                batch_sampler=batches,  # type: ignore[arg-type]
                collate_fn=collate,
                num_workers=workers_for(warm_up, self.workers),
                pin_memory=self.pin,
            )
            iterator = iter(loader)
            yield ((batch, 1.0) for batch in iterator)

        return Feed(method, budget, settings, opened, (warm_up,))


def workers_for(batch: dict[str, Any], wanted: int, place: str = "/dev/shm") -> int:
    """`wanted`, or as many workers as shared memory has room for, with two batches like this one of each in it.

    A worker that finds no room there is killed; without workers nothing lies there.
    """
    size = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    fitting = min(wanted, int(0.8 * shutil.disk_usage(place).free // (2 * size)))
    if fitting < wanted:
        print(f"{fitting} workers instead of {wanted}: {place} is too small for batches of {size:,} bytes", flush=True)
    return fitting


def first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Samples in `order`, each into the first row that has room for it; one longer than `budget` is a row alone."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        fits = next((row for row, left in enumerate(room) if left >= lengths[index]), None)
        if fits is None:
            rows.append([])
            room.append(budget)
            fits = len(rows) - 1
        rows[fits].append(index)
        room[fits] -= lengths[index]
    return rows


def has_public() -> bool:
    """Whether the public package is installed."""
    return importlib.util.find_spec("odb") is not None
