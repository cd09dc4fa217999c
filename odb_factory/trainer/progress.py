"""How far a run is, counted in samples: the only measure that is known from the start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from odb_factory.runtime.messages import StepInfo


@dataclass
class SampleProgress:
    """Progress of a run over `epochs` passes of `dataset_size` samples, on all ranks together.

    Args:
        dataset_size: samples of the data set.
        epochs: passes, may be fractional.
        first_guess: optimizer updates of the whole run, as long as nothing is known.
    """

    dataset_size: int
    epochs: float
    first_guess: int
    updates: int = 0
    """Optimizer updates so far."""
    emitted: int = 0
    """Samples emitted so far, on all ranks."""
    handled: int = 0
    """Samples emitted or dropped so far; whole epochs count fully, so that the end is reached exactly."""
    epoch_over: bool = False
    """The last update closed an epoch."""
    _in_epoch: int = field(default=0, repr=False)
    _epochs_done: int = field(default=0, repr=False)

    @property
    def total(self) -> int:
        """Samples of the whole run."""
        return max(1, math.ceil(self.dataset_size * self.epochs))

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.handled / self.dataset_size

    @property
    def share(self) -> float:
        """Of the samples of the whole run, those that are done; at most 1."""
        return min(1.0, self.handled / self.total)

    @property
    def in_epoch(self) -> int:
        """Samples of the current epoch that were emitted or dropped."""
        return self._in_epoch

    @property
    def finished(self) -> bool:
        """All epochs asked for are done."""
        return self.handled >= self.total

    def advance(self, update: Sequence[StepInfo]) -> None:
        """Count one optimizer update: the StepInfos of its micro-batches."""
        self.updates += 1
        self.emitted += sum(info.global_samples for info in update)
        self._in_epoch += sum(info.global_samples + info.global_dropped for info in update)
        self.epoch_over = any(info.last for info in update)
        if self.epoch_over:
            self._epochs_done += 1
            self._in_epoch = 0
        self.handled = self._epochs_done * self.dataset_size + self._in_epoch

    def cut_epoch(self) -> None:
        """The epoch is over before its end, as a callback asked for; it counts as a whole."""
        self._epochs_done += 1
        self._in_epoch = 0
        self.handled = self._epochs_done * self.dataset_size

    def state(self) -> dict[str, int]:
        """What `restore` needs, fit for JSON."""
        return {
            "updates": self.updates,
            "emitted": self.emitted,
            "in_epoch": self._in_epoch,
            "epochs_done": self._epochs_done,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was saved."""
        self.updates = state["updates"]
        self.emitted = state["emitted"]
        self._in_epoch = state["in_epoch"]
        self._epochs_done = state["epochs_done"]
        self.handled = self._epochs_done * self.dataset_size + self._in_epoch

    def estimated_updates(self) -> int:
        """Updates of the whole run: an estimate above `updates` until the end is reached, then exact."""
        if self.finished:
            return self.updates
        if not self.handled:
            return max(1, self.first_guess)
        return max(self.updates + 1, round(self.updates * self.total / self.handled))

    def estimated_samples(self, max_steps: int = 0) -> int:
        """Samples of the whole run; with `max_steps` updates, if that is above 0, an estimate that ends exact."""
        if max_steps <= 0:
            return max(self.total, self.handled)
        if self.updates >= max_steps:
            return self.handled
        if not self.updates:
            return max(1, round(max_steps * self.dataset_size * self.epochs / self.first_guess))
        return max(self.handled + 1, round(self.handled * max_steps / self.updates))
