"""Raw rows of a published file, one after the other: JSON lines, one large JSON list, or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
"""Characters that are read at once from a JSON list."""

LONGEST_ITEM = 64 << 20
"""Characters of a JSON list without the end of an item, after which the file counts as broken."""

PARQUET_ROWS = 256
"""Rows of a Parquet file that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that could not be read."""

    reason: str
    text: str
    """How it begins."""


def read_rows(path: Path, columns: Sequence[str], skip: int = 0) -> Iterator[Any]:
    """Yield the rows of a file after the first `skip` ones; a line that is no JSON comes as `Broken`.

    Args:
        columns: what is read of a Parquet file, which must have at least these.

    Raises:
        ValueError: the file is of another kind, or cannot be read as what it claims to be.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path, columns, skip)
    elif path.suffix in (".json", ".jsonl"):
        with path.open("rb") as file:
            is_list = path.suffix == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        yield from _json_list(path, skip) if is_list else _json_lines(path, skip)
    else:
        raise ValueError(f"{path} is none of .parquet, .json, .jsonl, so it cannot be read.")


def _json_lines(path: Path, skip: int) -> Iterator[Any]:
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        for number, line in enumerate(lines):
            if number < skip:
                continue
            try:
                yield json.loads(line)
            except ValueError:  # also where it is not UTF-8
                yield Broken("line that is not valid JSON", line[:200].decode("utf-8", "replace").strip())


def _json_list(path: Path, skip: int) -> Iterator[Any]:
    """Item by item, so that a list of some hundred megabytes is never in memory."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        buffer, at, count = file.read(BLOCK), 0, 0
        at = _after_space(buffer, 0) + 1  # behind the opening bracket
        while True:
            at = _after_space(buffer, at)
            if buffer.startswith("]", at):
                return
            if buffer.startswith(",", at):
                at = _after_space(buffer, at + 1)
            try:
                item, end = decoder.raw_decode(buffer, at)
            except ValueError:
                end = len(buffer)
            if end < len(buffer):
                at, count = end, count + 1
                if count > skip:
                    yield item
                continue
            more = file.read(BLOCK)
            if not more or len(buffer) - at > LONGEST_ITEM:
                raise ValueError(
                    f"{path} is not valid JSON after row {count}; it is cut off or damaged: fetch it again."
                )
            buffer, at = buffer[at:] + more, 0


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n\ufeff":
        at += 1
    return at


def _parquet(path: Path, columns: Sequence[str], skip: int) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                have = ", ".join(file.schema_arrow.names)
                raise ValueError(f"{path} has no column {missing[0]} (it has {have}); it is not the expected data set.")
            for batch in file.iter_batches(PARQUET_ROWS, columns=list(columns)):
                if skip >= len(batch):
                    skip -= len(batch)
                    continue
                yield from batch.slice(skip).to_pylist()
                skip = 0
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error}); fetch it again.") from None


def count_parquet(path: Path) -> int:
    """Rows of a Parquet file, by its footer."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows: int = file.metadata.num_rows
            return rows
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error}); fetch it again.") from None
