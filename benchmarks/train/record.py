"""What the ranks of a driven run write down: a line a micro-batch as it was trained, and figures at the end."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


def digest(ids: Sequence[int]) -> str:
    """Stands for the content of a sample: the same tokens, the same digest."""
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Line:
    """A micro-batch of one rank."""

    rows: list[str]
    """Digests of the real tokens of each row."""
    width: int
    """Tokens of a row, with padding."""
    loss_tokens: int
    """Supervised targets; none: a filler."""


class Recorder:
    """Writes the lines of one rank while it trains."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._end = directory / f"driver.rank{rank}.json"
        self._file = (directory / f"driver.rank{rank}.jsonl").open("w", encoding="utf-8")

    def add(self, line: Line) -> None:
        self._file.write(json.dumps(asdict(line)) + "\n")

    def finish(self, figures: dict[str, Any]) -> None:
        """The run is over; `figures` are those of this rank."""
        self._file.close()
        self._end.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def read(directory: Path, ranks: int) -> tuple[list[list[Line]], list[dict[str, Any]]]:
    """Lines and final figures of each rank."""
    lines = [
        [Line(**json.loads(line)) for line in (directory / f"driver.rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]
    ends = [json.loads((directory / f"driver.rank{rank}.json").read_text()) for rank in range(ranks)]
    return lines, ends
