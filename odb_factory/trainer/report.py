"""The audit: what each rank trained on, step by step, and the totals of the run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.core.stats import padding_share
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.state import pack_bits, unpack_bits

SUMMARY_NAME = "odb_summary.json"


MOST_NAMED = 1000
"""How many dropped samples, and how many that an epoch left out, are named in the summary; all are counted."""

_DROPPED = "dropped: "
"""Begins the names of counts of dropped samples, by reason."""


def audit_name(rank: int | str) -> str:
    """File name of a rank's audit."""
    return f"odb_audit.rank{rank}.jsonl"


def _rank_of(path: Path) -> int:
    digits = path.name.removeprefix("odb_audit.rank").removesuffix(".jsonl")
    return int(digits) if digits.isdigit() else -1


def _cut(path: Path, keep_updates: int) -> None:
    """Remove the lines after update `keep_updates`, and the file where none remains."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            update = json.loads(line)["update"]
        except (ValueError, KeyError):  # the process was killed while it wrote
            continue
        if update <= keep_updates:
            kept.append(line)
    if kept:
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(kept), encoding="utf-8")
        scratch.replace(path)
    else:
        path.unlink()


class Audit:
    """Records what one rank has trained on.

    Args:
        directory: where the files go; made if missing.
        rank: this rank.
        world_size: number of ranks.
        dataset_size: samples of the data set.
        token_budget: to count overlong samples (tokens).
        write_steps: also write one JSON line a step to `odb_audit.rank{r}.jsonl`.
        keep_updates: a run is resumed after so many updates: what the files of all ranks say of later ones is removed,
            since it was lost with the process. 0: older files are replaced.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int = 1,
        dataset_size: int,
        token_budget: int,
        write_steps: bool,
        keep_updates: int = 0,
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._file: TextIO | None = None
        if write_steps:
            for path in self._files(world_size):
                _cut(path, keep_updates)
            self._file = open(self.directory / audit_name(rank), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._budget = token_budget
        self.counts = np.zeros(dataset_size, dtype=np.int32)
        """(dataset_size,) how often this rank emitted each index in the current epoch."""
        self.totals: Counter[str] = Counter()
        """Counts that are the same on every rank."""
        self.local: Counter[str] = Counter()
        """Counts of this rank alone."""
        self.dropped: dict[tuple[int, str], Dropped] = {}
        """Samples that this rank dropped, by index and reason; the first ones, its part of `MOST_NAMED`."""
        self._most_dropped = max(10, MOST_NAMED // world_size)
        self.left: list[int] = []
        """Indices that the last epoch left out (non-join mode), at most `MOST_NAMED`."""
        self._ever = np.zeros(dataset_size, dtype=bool)
        self._round = -1

    def _files(self, world_size: int) -> list[Path]:
        """This rank's file, and on rank 0 those of ranks that an earlier run had and this one has not."""
        own = self.directory / audit_name(self._rank)
        others = [path for path in self.directory.glob(audit_name("*")) if _rank_of(path) >= world_size]
        return [own, *(others if self._rank == 0 else [])]

    def record(self, info: StepInfo, update: int) -> None:
        """A step was trained on, as part of this update of the run (1-based)."""
        self._count(info)
        if self._file is not None:
            line: dict[str, Any] = {
                "update": update,
                "step": info.step,
                "epoch": info.epoch,
                "indices": info.indices,
                "lengths": info.lengths,
                "loss_tokens": info.loss_tokens,
                "padded_tokens": info.padded_tokens,
                "work": info.work,
                "idle": info.idle,
            }
            if info.dropped:
                line["dropped"] = [[d.index, d.reason, d.bad] for d in info.dropped]
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
        last, self._round = self._round, info.round
        return last

    def add_dropped(self, dropped: tuple[Dropped, ...]) -> None:
        """Samples that were dropped on this rank."""
        for d in dropped:
            self.local[_DROPPED + d.reason] += 1
            self.local["bad"] += d.bad
            if len(self.dropped) < self._most_dropped:
                self.dropped.setdefault((d.index, d.reason), d)

    def close_epoch(self, counts: np.ndarray) -> None:
        """An epoch is over. `counts` (dataset_size,) says how often all ranks together emitted each index in it."""
        self._ever |= counts > 0
        self.totals["repeated"] += int(np.maximum(counts - 1, 0).sum())
        self.totals["unique"] = int(self._ever.sum())
        self.totals["epochs"] += 1
        self.counts[:] = 0
        self._round = -1

    def state(self, counts: np.ndarray, local: dict[str, int], dropped: list[Dropped]) -> dict[str, Any]:
        """What `restore` needs, fit for JSON: `counts` of the open epoch, and the rest as for `summary`."""
        return {
            "totals": dict(self.totals),
            "local": local,
            "dropped": [dataclasses.astuple(d) for d in dropped],
            "left": self.left,
            "emitted": pack_bits(counts > 0),
            "ever": pack_bits(self._ever),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, by whatever ranks. Counts of single ranks go to rank 0."""
        self.totals.update(state["totals"])
        self.left = state["left"]
        self._ever = unpack_bits(state["ever"], len(self._ever))
        if self._rank == 0:
            self.local.update(state["local"])
            self.dropped.update({(fields[0], fields[1]): Dropped(*fields) for fields in state["dropped"]})
            self.counts += unpack_bits(state["emitted"], len(self.counts))

    def summary(self, local: dict[str, int], dropped: list[Dropped]) -> dict[str, Any]:
        """The content of `odb_summary.json`, out of all ranks' summed `local` counts and all their dropped samples."""
        count = Counter(local)
        named = sorted({(d.index, d.reason): d for d in dropped}.values(), key=lambda d: (d.index, d.reason))
        return {
            "epochs": self.totals["epochs"],
            "samples": self.totals["samples"],
            "unique": self.totals["unique"],
            "repeated": self.totals["repeated"],
            "left": self.totals["left"],
            "left_samples": self.left,
            "dropped": {key.removeprefix(_DROPPED): count[key] for key in sorted(count) if key.startswith(_DROPPED)},
            "bad": count["bad"],
            "dropped_samples": [
                {"index": d.index, "reason": d.reason, "detail": d.detail, "bad": d.bad} for d in named[:MOST_NAMED]
            ],
            "steps": self.totals["steps"],
            "rounds": self.totals["rounds"],
            "fillers": count["fillers"],
            "without_loss_tokens": count["without_loss_tokens"],
            "overlong": count["overlong"],
            "short_windows": count["short_windows"],
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
