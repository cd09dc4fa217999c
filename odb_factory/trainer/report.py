"""The files of a run: the audit, which says what each rank trained on, step by step, and the summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from odb_factory.runtime.messages import StepInfo

SUMMARY_NAME = "odb_summary.json"


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
    """The files of one rank: `odb_audit.rank{r}.jsonl`, and the directory of those of the run.

    Args:
        directory: where the files go; made if missing.
        rank: this rank.
        world_size: number of ranks.
        write_steps: write one JSON line a step.
        keep_updates: a run is resumed after so many updates: what the files of all ranks say of later ones is removed,
            since it was lost with the process. 0: older files are replaced.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int = 1,
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

    def _files(self, world_size: int) -> list[Path]:
        """This rank's file, and on rank 0 those of ranks that an earlier run had and this one has not."""
        own = self.directory / audit_name(self._rank)
        others = [path for path in self.directory.glob(audit_name("*")) if _rank_of(path) >= world_size]
        return [own, *(others if self._rank == 0 else [])]

    def write(self, info: StepInfo, update: int) -> None:
        """A step was trained on, as part of this update of the run (1-based)."""
        if self._file is None:
            return
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
