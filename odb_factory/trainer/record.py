"""The audit of all ranks together: what needs collectives over the trainer's process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from odb_factory.core.sample import Dropped
from odb_factory.runtime.messages import EpochEnd
from odb_factory.trainer.report import MOST_NAMED, Audit, write_summary


class RunRecord:
    """The audit of this rank, closed, saved and summed with those of the others; every rank calls the same methods.

    Args:
        audit: of this rank.
        world_size: number of ranks.
        device: where tensors must lie for collectives.
    """

    def __init__(self, audit: Audit, *, world_size: int, device: torch.device) -> None:
        self.audit = audit
        self._world_size = world_size
        self._device = device
        self._open = False

    def open_epoch(self) -> None:
        """An epoch begins, or goes on after a resumption."""
        self._open = True

    def close_epoch(self, end: EpochEnd | None) -> None:
        """The epoch is over; `end` is what the loader said then, None where `max_steps` ended it. Closes it once."""
        if not self._open:
            return
        self._open = False
        left = 0
        if end is not None:
            self.audit.add_dropped(end.dropped)
            self.audit.local["short_windows"] += end.short_windows
            left = end.left
        counts = self._counts()
        if left:
            dropped = {d.index for d in self._gathered()[1]}
            self.audit.left = [int(i) for i in np.flatnonzero(counts == 0) if i not in dropped][:MOST_NAMED]
        self.audit.totals["left"] += left
        self.audit.close_epoch(counts)

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {**self.audit.state(self._counts(), *self._gathered()), "open": self._open}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved."""
        self.audit.restore(state)
        self._open = state["open"]

    def finish(self, write: bool) -> dict[str, Any]:
        """The summary of the run, written by the ranks that `write`."""
        self.close_epoch(None)  # one that was resumed, with nothing left to do
        summary = self.audit.summary(*self._gathered())
        if write:
            write_summary(self.audit.directory, summary)
        return summary

    def _counts(self) -> np.ndarray:
        """(dataset_size,) how often all ranks emitted each index in this epoch."""
        counts = torch.from_numpy(self.audit.counts.copy()).to(self._device)
        if self._world_size > 1:
            dist.all_reduce(counts)
        summed: np.ndarray = counts.cpu().numpy()
        return summed

    def _gathered(self) -> tuple[dict[str, int], list[Dropped]]:
        """The counts of single ranks, summed, and what they dropped: the first ones of each, in all `MOST_NAMED`."""
        local: Counter[str] = Counter()
        for counts in gather_object([dict(self.audit.local)]):
            local.update(counts)
        return dict(local), gather_object(list(self.audit.dropped.values()))
