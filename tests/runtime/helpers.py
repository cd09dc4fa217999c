"""Data sets, a collate function and checks for the tests of the runtime. All of it pickles, and none needs pytest."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from odb_factory import DropSample, OdbConfig, OdbDataLoader, StepInfo
from odb_factory.core.budget import ceil_multiple
from odb_factory.runtime.messages import EpochEnd

PAD_ID = -1
MASK = -100


class Lengths:
    """Sample i has `lengths[i]` tokens, all of them i; its first third is masked, so `count_loss(i)` is known.

    Args:
        lengths: (N,) tokens of each sample.
        drop: indices that raise `DropSample`.
        fail: indices that raise KeyError.
        sleep: each read takes a random time of up to this (seconds).
        extra: further tensors in each sample.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        drop: Collection[int] = (),
        fail: Collection[int] = (),
        sleep: float = 0.0,
        extra: int = 0,
    ) -> None:
        self.lengths = list(lengths)
        self.drop = frozenset(drop)
        self.fail = frozenset(fail)
        self.sleep = sleep
        self.extra = extra

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.sleep:
            time.sleep(random.SystemRandom().random() * self.sleep)
        if index in self.drop:
            raise DropSample("broken", f"sample number {index}")
        if index in self.fail:
            raise KeyError(f"no key in sample {index}")
        ids = torch.full((self.lengths[index],), index)
        labels = ids.clone()
        labels[: len(labels) // 3] = MASK
        more = {f"extra{i}": torch.zeros(4) for i in range(self.extra)}
        return {"input_ids": ids, "labels": labels, **more}

    def count_loss(self, index: int) -> int:
        """Supervised targets of a sample, counted without the code under test."""
        n = self.lengths[index]
        return min(n - 1, n - n // 3)


class Counted(Lengths):
    """Counts its reads over all processes."""

    def __init__(self, lengths: Sequence[int], **options: Any) -> None:
        super().__init__(lengths, **options)
        self.reads = multiprocessing.get_context("fork").Value("l", 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.reads.get_lock():
            self.reads.value += 1
        return super().__getitem__(index)


def heavy_tail(size: int, seed: int = 0, longest: int = 120) -> list[int]:
    """Lengths as in conversations: mostly short, some long, a few at the longest."""
    rng = random.Random(seed)
    return [min(longest, 2 + int(rng.paretovariate(1.1) * 6)) for _ in range(size)]


def uneven(size: int, world_size: int) -> list[int]:
    """Lengths that make the shards `range(size)[r::world_size]` need very different numbers of groups."""
    return [5 + 25 * (i % world_size) + i % 4 for i in range(size)]


@dataclass(frozen=True)
class PadCollate:
    """Pads `input_ids` and `labels` of a batch to one length; may fail on a sample, or wait.

    Args:
        multiple: pad to a multiple of this.
        fail_on: raise ZeroDivisionError on a batch that holds this index.
        sleep: seconds that each batch takes.
    """

    multiple: int = 1
    fail_on: int | None = None
    sleep: float = 0.0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if any(int(s["input_ids"][0]) == self.fail_on for s in samples):
            raise ZeroDivisionError("collate went wrong")
        time.sleep(self.sleep)
        width = ceil_multiple(max(len(s["input_ids"]) for s in samples), self.multiple)
        ids = torch.full((len(samples), width), PAD_ID)
        labels = torch.full((len(samples), width), MASK)
        for row, sample in enumerate(samples):
            ids[row, : len(sample["input_ids"])] = sample["input_ids"]
            labels[row, : len(sample["labels"])] = sample["labels"]
        return {"input_ids": ids, "labels": labels}


@dataclass
class Epoch:
    """What a rank saw of one epoch."""

    infos: list[StepInfo] = field(default_factory=list)
    end: EpochEnd | None = None

    @property
    def indices(self) -> list[int]:
        """Emitted indices, in order."""
        return [i for info in self.infos for i in info.indices]

    @property
    def dropped(self) -> list[Any]:
        """What was dropped on this rank."""
        return [d for info in self.infos for d in info.dropped] + list(self.end.dropped if self.end else ())

    @property
    def global_dropped(self) -> int:
        """How many samples all ranks dropped, as this rank was told."""
        return sum(info.global_dropped for info in self.infos) + (self.end.global_dropped if self.end else 0)


def run_epoch(loader: OdbDataLoader, data: Lengths, on_step: Callable[[StepInfo], object] = lambda info: None) -> Epoch:
    """Iterate one epoch to its end, and check each batch against its `StepInfo`; `on_step` is called in each step."""
    epoch = Epoch()
    for batch, info in loader:
        check_batch(batch, info, data, loader.config)
        epoch.infos.append(info)
        on_step(info)
    epoch.end = loader.epoch_ends[-1]
    check_steps(epoch)
    return epoch


def check_batch(batch: Any, info: StepInfo, data: Lengths, config: OdbConfig) -> None:
    """The batch is what the `StepInfo` says, and a group of several samples is within the budget."""
    if info.idle:
        assert info.indices == ()
        assert info.lengths == ()
        assert (info.tokens, info.padded_tokens, info.loss_tokens) == (0, 0, 0)
        if config.idle == "skip":
            assert batch is None
        else:
            ids = batch["input_ids"]
            assert ids.shape[0] == 1, "a filler is one sample"
            assert data.lengths[int(ids[0, 0])] == int((ids != PAD_ID).sum()), "a filler is a real sample"
        return
    ids, labels = batch["input_ids"], batch["labels"]
    assert info.samples > 0
    assert ids[:, 0].tolist() == list(info.indices)
    assert (ids != PAD_ID).sum(1).tolist() == list(info.lengths) == [data.lengths[i] for i in info.indices]
    assert info.tokens == sum(info.lengths)
    assert info.padded_tokens == ids.numel()
    assert info.loss_tokens == int((labels[:, 1:] != MASK).sum()) == sum(map(data.count_loss, info.indices))
    assert info.padded_tokens <= config.token_budget or info.samples == 1


def check_steps(epoch: Epoch) -> None:
    """Steps are numbered without gaps and `last` is true of the last one only."""
    assert epoch.end is not None
    assert [info.step for info in epoch.infos] == list(range(epoch.end.steps))
    assert [info.last for info in epoch.infos] == [False] * (len(epoch.infos) - 1) + [True] * bool(epoch.infos)


def check_world(ranks: Sequence[Epoch], data: Lengths, *, left: int = 0) -> None:
    """One epoch of all ranks: aligned steps, every index exactly once, and exact totals (G1, G2, G7)."""
    assert len({len(epoch.infos) for epoch in ranks}) == 1, [len(epoch.infos) for epoch in ranks]
    for infos in zip(*(epoch.infos for epoch in ranks), strict=True):
        assert len({(i.step, i.round, i.last, i.epoch) for i in infos}) == 1
        totals = (
            sum(i.samples for i in infos),
            sum(i.loss_tokens for i in infos),
            sum(i.tokens for i in infos),
            sum(i.padded_tokens for i in infos),
        )
        for info in infos:
            assert totals == (
                info.global_samples,
                info.global_loss_tokens,
                info.global_tokens,
                info.global_padded_tokens,
            )
    emitted = [i for epoch in ranks for i in epoch.indices]
    dropped = [d.index for epoch in ranks for d in epoch.dropped]
    assert len(set(emitted)) == len(emitted), "an index came twice"
    assert set(emitted).isdisjoint(dropped)
    assert sorted(dropped) == sorted(set(dropped))
    assert len(emitted) + len(dropped) + left == len(data)
    for epoch in ranks:
        assert epoch.global_dropped == len(dropped)


def collect(loader: OdbDataLoader) -> list[StepInfo]:
    """The infos of one epoch."""
    return [info for _, info in loader]


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Whether the condition came true within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def shared_memory_files() -> set[str]:
    """Files in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def all_of(epochs: Iterable[Epoch]) -> list[int]:
    """Sorted indices of several epochs."""
    return sorted(i for epoch in epochs for i in epoch.indices)
