"""The schema of what is measured: a row, written as a line of JSON at once, read by `report` and `plot`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from benchmarks.errors import BenchmarkError

Value = float | int | str | bool | None

PACKAGES = (
    "odb-factory",
    "torch",
    "transformers",
    "llamafactory",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "online-dynamic-batching",
)
"""Packages whose versions stand in each row, where they are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: a method on some data, once."""

    benchmark: str
    """Name of the benchmark, as on the command line."""
    what: str
    """What was measured, where a benchmark measures several things."""
    data: str
    """Name of the data: a profile of lengths, a data set."""
    method: str
    """`standard`, `sorted`, `packing`, `gmt`, `bmt`, `paper`, `public` or `odb`; a variant behind a blank."""
    ranks: int | None = None
    depth: int | None = None
    """Outstanding depth D (samples)."""
    budget: int | None = None
    """Padded tokens of a micro-batch, at most; of Standard: batch size x cutoff."""
    seed: int | None = None
    settings: dict[str, Value] = field(default_factory=dict)
    """Whatever else was chosen: batch size, samples, workers, the number of the repetition."""
    figures: dict[str, Value] = field(default_factory=dict)
    """Name -> value; units are part of the name (`_s` seconds, `_mb` 1e6 bytes)."""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Value] = field(default_factory=dict)
    date: str = ""
    """UTC, ISO 8601."""


class RowWriter:
    """Completes rows with command, versions, hardware and date, and writes each at once: a run may be cut short."""

    def __init__(self, benchmark: str, command: str, file: Path) -> None:
        self._benchmark = benchmark
        self._command = command
        self._versions = versions()
        self._hardware = hardware()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = file.open("w", encoding="utf-8")
        self.rows: list[Row] = []

    def add(self, **values: Any) -> Row:
        """A row of `values` (see `Row`); figures that are floats are rounded to six digits."""
        values["figures"] = {name: _rounded(value) for name, value in values["figures"].items()}
        row = Row(
            benchmark=self._benchmark,
            command=self._command,
            versions=self._versions,
            hardware=self._hardware,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            **values,
        )
        self._file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self._file.flush()
        self.rows.append(row)
        return row

    def close(self) -> None:
        self._file.close()


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows of some files.

    Raises:
        BenchmarkError: a line is not a row; names file and line.
    """
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append(Row(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise BenchmarkError(
                    f"{file}, line {number} is not a row of a benchmark: {error}; measure again."
                ) from None
    return rows


def versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Value]:
    """Processor, its cores that this process may use, memory, and the GPU where there is one."""
    import torch

    found: dict[str, Value] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
    return found


def hardware_in_words(row: Row) -> str:
    """One line for a table's caption."""
    words = f"{row.hardware.get('cpu')}, {row.hardware.get('cores')} cores, {row.hardware.get('memory_gib')} GiB"
    if "gpu" in row.hardware:
        words = f"{row.hardware.get('gpus')} x {row.hardware['gpu']}; {words}"
    return words


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _rounded(value: Value) -> Value:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, least, most)"""
    import statistics

    return statistics.median(values), min(values), max(values)
