"""Reads the raw rows of a published file one by one: JSON Lines, one large JSON list, or Parquet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

KINDS = (".parquet", ".json", ".jsonl")
"""Suffixes of supported files."""

BLOCK = 1 << 20
"""Characters that are read at a time from a JSON list."""

LONGEST_ITEM = 64 << 20
"""If an item of a JSON list is longer than this (characters), the file counts as broken."""

PARQUET_ROWS = 256
"""Rows of a Parquet file that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that could not be read."""

    reason: str
    text: str
    """Its beginning."""


def read_rows(path: Path, columns: Sequence[str], skip: int = 0, optional: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the rows of a file after the first `skip`; a line of invalid JSON is yielded as `Broken`.

    Args:
        columns: the columns to read from a Parquet file, which must have them.
        optional: columns to read if the file has them.

    Raises:
        ValueError: the file is of another kind, or cannot be read as its suffix says.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path, columns, skip, optional)
    elif path.suffix in KINDS:
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:4]:
            raise ValueError(f"{path} is not UTF-8 but UTF-16 or UTF-32; convert it, as with iconv -t UTF-8.")
        is_list = path.suffix == ".json" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        yield from _json_list(path, skip) if is_list else _json_lines(path, skip)
    else:
        raise ValueError(f"{path} is none of {', '.join(KINDS)}, so it cannot be read.")


def _json_lines(path: Path, skip: int) -> Iterator[Any]:
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        for number, line in enumerate(lines):
            if number < skip:
                continue
            try:
                # decoded here, since json.loads would also accept bytes in UTF-16
                yield json.loads(line.decode("utf-8-sig", "surrogatepass"))
            except ValueError:  # also if it is not UTF-8
                yield Broken("line that is not valid JSON", _begin(line))
            except RecursionError:
                yield Broken("line that is nested too deeply", _begin(line))


def _begin(line: bytes) -> str:
    return line[:200].decode("utf-8", "replace").strip()


def _json_list(path: Path, skip: int) -> Iterator[Any]:
    """Decode item by item, so that a list of some hundred megabytes is never in memory as a whole."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        buffer, at, count = file.read(BLOCK), 0, 0
        at = _after_space(buffer, 0) + 1  # after the opening bracket
        while True:
            at = _after_space(buffer, at)
            if buffer.startswith("]", at):
                if buffer[at + 1 :].strip() or any(map(str.strip, iter(partial(file.read, BLOCK), ""))):
                    raise ValueError(
                        f"{path} continues after the end of its list (row {count}), as if several files had been "
                        "joined; make one list of them, or download it again."
                    )
                return
            if buffer.startswith(",", at):
                at = _after_space(buffer, at + 1)
            try:
                item, end = decoder.raw_decode(buffer, at)
            except ValueError:
                end = len(buffer)
            except RecursionError:
                raise ValueError(f"{path} is nested too deeply after row {count}; download it again.") from None
            if end < len(buffer):
                at, count = end, count + 1
                if count > skip:
                    yield item
                continue
            more = file.read(BLOCK)
            if not more or len(buffer) - at > LONGEST_ITEM:
                raise ValueError(
                    f"{path} is not valid JSON after row {count}; it is truncated or damaged: download it again."
                )
            buffer, at = buffer[at:] + more, 0


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n\ufeff":
        at += 1
    return at


def _parquet(path: Path, columns: Sequence[str], skip: int, optional: Sequence[str]) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with _readable(path), ParquetFile(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            have = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path} has no column {missing[0]} (it has {have}); it is not the expected dataset.")
        read = dict.fromkeys([*(name for name in optional if name in file.schema_arrow.names), *columns])
        for batch in file.iter_batches(PARQUET_ROWS, columns=list(read)):
            if skip >= len(batch):
                skip -= len(batch)
                continue
            yield from batch.slice(skip).to_pylist()
            skip = 0


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn Arrow's exceptions about a damaged Parquet file into a ValueError with the file's name."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"{path} is not a readable Parquet file ({said}); download it again.") from None


def count_parquet(path: Path) -> int:
    """The number of rows of a Parquet file, from its footer."""
    from pyarrow.parquet import ParquetFile

    with _readable(path), ParquetFile(path) as file:
        rows: int = file.metadata.num_rows
        return rows
