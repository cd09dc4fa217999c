"""The audit: what each rank trained on, step by step, and the totals of the run."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.core.stats import padding_share
from odb_factory.runtime.messages import StepInfo

SUMMARY_NAME = "odb_summary.json"


def audit_name(rank: int) -> str:
    """File name of a rank's audit."""
    return f"odb_audit.rank{rank}.jsonl"


class Audit:
    """Records what one rank has trained on.

    Args:
        directory: where the files go; made if missing.
        rank: this rank.
        dataset_size: samples of the data set.
        token_budget: to count overlong samples (tokens).
        write_steps: also write one JSON line a step to `odb_audit.rank{r}.jsonl`, replacing an older file.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, rank: int, dataset_size: int, token_budget: int, write_steps: bool
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        if write_steps:
            self._file = open(self.directory / audit_name(rank), "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._budget = token_budget
        self.counts = np.zeros(dataset_size, dtype=np.int32)
        """(dataset_size,) how often this rank emitted each index in the current epoch."""
        self.totals: Counter[str] = Counter()
        """Counts that are the same on every rank."""
        self.local: Counter[str] = Counter()
        """Counts of this rank alone."""
        self.dropped: list[Dropped] = []
        self._ever = np.zeros(dataset_size, dtype=bool)
        self._round = -1

    def record(self, info: StepInfo) -> None:
        """A step was trained on."""
        self._count(info)
        if self._file is not None:
            line: dict[str, Any] = {
                "step": info.step,
                "epoch": info.epoch,
                "indices": info.indices,
                "lengths": info.lengths,
                "loss_tokens": info.loss_tokens,
                "padded_tokens": info.padded_tokens,
                "idle": info.idle,
            }
            if info.dropped:
                line["dropped"] = [[d.index, d.reason] for d in info.dropped]
            self._file.write(json.dumps(line) + "\n")

    def _count(self, info: StepInfo) -> None:
        np.add.at(self.counts, np.asarray(info.indices, dtype=np.int64), 1)
        self.add_dropped(info.dropped)
        self.totals.update(
            steps=1,
            samples=info.global_samples,
            loss_tokens=info.global_loss_tokens,
            tokens=info.global_tokens,
            padded_tokens=info.global_padded_tokens,
            dropped=info.global_dropped,
        )
        self.totals["rounds"] += info.round - self._last_round(info)
        self.local.update(
            fillers=int(info.idle),
            without_loss_tokens=int(not info.idle and info.loss_tokens == 0),
            overlong=sum(length > self._budget for length in info.lengths),
        )

    def _last_round(self, info: StepInfo) -> int:
        if info.step == 0:
            self._round = -1
        last, self._round = self._round, info.round
        return last

    def add_dropped(self, dropped: tuple[Dropped, ...]) -> None:
        """Samples that were dropped on this rank."""
        self.dropped.extend(dropped)

    def close_epoch(self, counts: np.ndarray) -> None:
        """An epoch is over. `counts` (dataset_size,) says how often all ranks together emitted each index in it."""
        self._ever |= counts > 0
        self.totals["repeated"] += int(np.maximum(counts - 1, 0).sum())
        self.totals["unique"] = int(self._ever.sum())
        self.totals["epochs"] += 1
        self.counts[:] = 0

    def summary(self, local: dict[str, int], dropped: list[Dropped]) -> dict[str, Any]:
        """The content of `odb_summary.json`, out of all ranks' summed `local` counts and all their dropped samples."""
        reasons = Counter(d.reason for d in dropped)
        return {
            "epochs": self.totals["epochs"],
            "samples": self.totals["samples"],
            "unique": self.totals["unique"],
            "repeated": self.totals["repeated"],
            "left": local["left"],
            "dropped": dict(sorted(reasons.items())),
            "dropped_samples": [
                {"index": d.index, "reason": d.reason, "detail": d.detail}
                for d in sorted(set(dropped), key=lambda d: (d.index, d.reason))
            ],
            "steps": self.totals["steps"],
            "rounds": self.totals["rounds"],
            "fillers": local["fillers"],
            "without_loss_tokens": local["without_loss_tokens"],
            "overlong": local["overlong"],
            "tokens": self.totals["tokens"],
            "loss_tokens": self.totals["loss_tokens"],
            "padded_tokens": self.totals["padded_tokens"],
            "padding": round(padding_share(self.totals["tokens"], self.totals["padded_tokens"]), 6),
        }

    def close(self) -> None:
        """Close the audit file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write `odb_summary.json`, whole or not at all."""
    path = directory / SUMMARY_NAME
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)
