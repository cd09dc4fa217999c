"""The ledger of a run: which samples, steps, updates and tokens there were, counted once, for all who want to know.

Both trainers hold a `Ledger`. The learning rate, the progress bar, logs, checkpoints, the summary and the picture read
it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.core.stats import padding_share
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.state import pack_values, unpack_bits, unpack_values

MOST_NAMED = 1000
"""How many dropped samples, and how many that an epoch left out, are named in the summary; all are counted."""

_DROPPED = "dropped: "
"""Begins the names of counts of dropped samples, by reason."""

NEVER, EARLIER, NOW = 0, 1, 2
"""When a sample was trained on last: not yet, in an earlier epoch, in the one that is open."""


class Ledger:
    """Counts of a run over `epochs` passes of `dataset_size` samples.

    Nothing is counted before its update is done, so that the ledger never says more than what is in the weights.

    Args:
        dataset_size: samples of the dataset.
        epochs: passes, may be fractional.
        first_guess: optimizer updates of the whole run, as long as nothing is known.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(
        self, *, dataset_size: int, epochs: float, first_guess: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.dataset_size = dataset_size
        self.epochs = epochs
        self.first_guess = first_guess
        self.token_budget = 0
        """To count overlong samples (tokens)."""
        self.counts: Counter[str] = Counter()
        """Counts over all ranks, the same on each: updates, steps, samples, tokens and so on."""
        self.local: Counter[str] = Counter()
        """Counts of this rank alone."""
        self.dropped: dict[tuple[int, str], Dropped] = {}
        """Samples that this rank dropped, by index and reason; the first ones, its part of `MOST_NAMED`."""
        self.left: list[int] = []
        """Indices that the last epoch left out (non-join mode), at most `MOST_NAMED`."""
        self.trained = np.zeros(dataset_size, dtype=np.uint8)
        """(dataset_size,) when this rank, and in closed epochs any, trained on each sample last; see `NEVER`."""
        self.in_epoch = 0
        """Samples of the current epoch that were emitted or dropped."""
        self.epoch_over = False
        """The last update closed an epoch."""
        self._epochs_done = 0
        self._samples_before = 0
        """Samples emitted before the open epoch."""
        self._round = -1
        self.rank, self.world_size = rank, world_size
        self._most_dropped = max(10, MOST_NAMED // world_size)

    # -- how far the run is

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return self.counts["updates"]

    @property
    def emitted(self) -> int:
        """Samples emitted so far, on all ranks."""
        return self.counts["samples"]

    @property
    def handled(self) -> int:
        """Samples emitted or dropped so far; whole epochs count fully, so that the end is reached exactly."""
        return self._epochs_done * self.dataset_size + self.in_epoch

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
    def finished(self) -> bool:
        """All epochs asked for are done."""
        return self.handled >= self.total

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

    # -- what happens

    def open_epoch(self) -> None:
        """An epoch begins, or goes on after a resumption."""
        self.epoch_over = False

    def add(self, update: Sequence[StepInfo]) -> None:
        """An update is done that was made of these steps."""
        self.counts["updates"] += 1
        for info in update:
            self._add_step(info)
        self.epoch_over = any(info.last for info in update)
        if self.epoch_over:
            self.cut_epoch()

    def cut_epoch(self) -> None:
        """The epoch counts as a whole: at its end, or before it as a callback asked for."""
        self._epochs_done += 1
        self.in_epoch = 0

    def _add_step(self, info: StepInfo) -> None:
        self.counts.update(
            steps=1,
            slots=self.world_size,
            samples=info.global_samples,
            loss_tokens=info.global_loss_tokens,
            tokens=info.global_tokens,
            padded_tokens=info.global_padded_tokens,
            work=info.global_work,
            dropped=info.global_dropped,
            rounds=info.round - self._round,
        )
        self.local.update(
            fillers=int(info.idle),
            without_loss_tokens=int(not info.idle and info.loss_tokens == 0),
            overlong=sum(length > self.token_budget for length in info.lengths),
        )
        self.add_dropped(info.dropped)
        self._round = info.round
        self.in_epoch += info.global_samples + info.global_dropped
        self.trained[list(info.indices)] = NOW

    def add_dropped(self, dropped: Iterable[Dropped]) -> None:
        """Samples that were dropped on this rank."""
        for d in dropped:
            self.local[_DROPPED + d.reason] += 1
            self.local["bad"] += d.bad
            if len(self.dropped) < self._most_dropped:
                self.dropped.setdefault((d.index, d.reason), d)

    def close_epoch(self, trained: np.ndarray) -> None:
        """An epoch is over. `trained` is that of all ranks together, the latest of each sample."""
        emitted = self.emitted - self._samples_before
        self.counts["repeated"] += emitted - int(np.count_nonzero(trained == NOW))
        self.counts["unique"] = int(np.count_nonzero(trained))
        self.counts["epochs"] += 1
        self.trained[:] = np.minimum(trained, EARLIER)
        self._samples_before, self._round = self.emitted, -1

    # -- what is saved, and said at the end

    def state(self, trained: np.ndarray, local: Mapping[str, int], dropped: Sequence[Dropped]) -> dict[str, Any]:
        """What `restore` needs, fit for JSON, out of what all ranks together trained on, counted and dropped."""
        counts = dict(self.counts)
        return {
            "progress": {
                "updates": counts.pop("updates", 0),
                "emitted": self.emitted,  # for whoever reads the file; `restore` takes it from the totals
                "in_epoch": self.in_epoch,
                "epochs_done": self._epochs_done,
            },
            "audit": {
                "totals": counts,
                "local": dict(local),
                "dropped": [dataclasses.astuple(d) for d in dropped],
                "left": self.left,
                "trained": pack_values(trained),
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, by whatever ranks. Counts of single ranks go to rank 0."""
        progress, audit = state["progress"], state["audit"]
        self.in_epoch, self._epochs_done = progress["in_epoch"], progress["epochs_done"]
        older = {name: int(audit.get("meter", {}).get(name, 0)) for name in ("work", "slots")}
        self.counts = Counter({**older, **audit["totals"], "updates": progress["updates"]})
        self.left = audit["left"]
        self.trained[:] = _trained_of(audit, self.dataset_size)
        self._samples_before = self.emitted - int(np.count_nonzero(self.trained == NOW))
        if self.rank == 0:
            self.local.update(audit["local"])
            self.dropped.update({(fields[0], fields[1]): Dropped(*fields) for fields in audit["dropped"]})

    def summary(self, local: Mapping[str, int], dropped: Iterable[Dropped]) -> dict[str, Any]:
        """The counts of `odb_summary.json`, out of all ranks' summed `local` counts and all their dropped samples."""
        counts, local = self.counts, Counter(local)
        named = sorted({(d.index, d.reason): d for d in dropped}.values(), key=lambda d: (d.index, d.reason))
        return {
            "samples": counts["samples"],
            "unique": counts["unique"],
            "repeated": counts["repeated"],
            "left": counts["left"],
            "left_samples": self.left,
            "dropped": {
                name.removeprefix(_DROPPED): local[name] for name in sorted(local) if name.startswith(_DROPPED)
            },
            "bad": local["bad"],
            "dropped_samples": [
                {"index": d.index, "reason": d.reason, "detail": d.detail, "bad": d.bad} for d in named[:MOST_NAMED]
            ],
            "steps": counts["steps"],
            "rounds": counts["rounds"],
            "fillers": local["fillers"],
            "without_loss_tokens": local["without_loss_tokens"],
            "overlong": local["overlong"],
            "short_windows": local["short_windows"],
            "tokens": counts["tokens"],
            "loss_tokens": counts["loss_tokens"],
            "padded_tokens": counts["padded_tokens"],
            "padding": round(padding_share(counts["tokens"], counts["padded_tokens"]), 6),
        }


def _trained_of(audit: Mapping[str, Any], size: int) -> np.ndarray:
    """`Ledger.trained` as it was saved; older states have two arrays of flags instead."""
    if "trained" in audit:
        return unpack_values(audit["trained"], size)
    now, earlier = unpack_bits(audit["emitted"], size), unpack_bits(audit["ever"], size)
    return np.where(now, NOW, np.where(earlier, EARLIER, NEVER)).astype(np.uint8)
