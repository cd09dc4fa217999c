"""The output files of a conversion: written in steps, continued after an interruption, renamed when complete."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INFO_NAME = "dataset_info.json"
"""LLaMA-Factory's description of the datasets in a folder."""

ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of an entry whose data is not in a local file; LLaMA-Factory prefers them to `file_name`."""


@dataclass(slots=True)
class Progress:
    """The progress of a conversion, as in the state file."""

    identity: dict[str, Any]
    """What is converted and how; a state with another identity is not continued."""
    rows: int = 0
    """Processed raw rows."""
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rows by reason."""
    data_bytes: int = 0
    dropped_bytes: int = 0


class Output:
    """`NAME.jsonl` and `NAME_dropped.jsonl` of a folder, written as `.part` files beside a state file.

    Steps are atomic: bytes after the last commit are truncated before more is written.
    """

    def __init__(self, folder: Path, name: str, identity: dict[str, Any]) -> None:
        self.data, self.dropped = folder / f"{name}.jsonl", folder / f"{name}_dropped.jsonl"
        self.report = folder / f"{name}_report.json"
        self._state = folder / f"{name}_state.json"
        self._parts = [Path(f"{path}.part") for path in (self.data, self.dropped)]
        self.progress = self._found(identity) or Progress(identity)
        lengths = (self.progress.data_bytes, self.progress.dropped_bytes)
        self._files = [_open_at(part, length) for part, length in zip(self._parts, lengths, strict=True)]

    @property
    def part(self) -> Path:
        """The file of data committed so far."""
        return self._parts[0]

    def _found(self, identity: dict[str, Any]) -> Progress | None:
        try:
            values = json.loads(self._state.read_text(encoding="utf-8"))
            progress = Progress(**{**values, "dropped": Counter(values["dropped"])})
            sizes = [part.stat().st_size for part in self._parts]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = sizes[0] >= progress.data_bytes and sizes[1] >= progress.dropped_bytes
        return progress if whole and progress.identity == identity else None

    def commit(self, rows: int, samples: Sequence[dict[str, Any]], dropped: Sequence[dict[str, Any]]) -> None:
        """Add the results of the next `rows` raw rows; each of `dropped` has a `reason`.

        Raises:
            ValueError: `rows` is not the number of samples and dropped rows.
        """
        if rows != len(samples) + len(dropped):
            raise ValueError(f"{rows} rows became {len(samples)} samples and {len(dropped)} dropped rows.")
        for file, items in zip(self._files, (samples, dropped), strict=True):
            file.write(b"".join(json.dumps(item).encode() + b"\n" for item in items))
            file.flush()
            os.fsync(file.fileno())
        progress = self.progress
        progress.rows += rows
        progress.written += len(samples)
        progress.dropped.update(item["reason"] for item in dropped)
        progress.data_bytes, progress.dropped_bytes = (file.tell() for file in self._files)
        state = {name: getattr(progress, name) for name in Progress.__slots__}
        write_json(self._state, state)

    def close(self) -> None:
        """Keep the files to be continued later; if nothing was committed, remove them."""
        for file in self._files:
            file.close()
        if not self.progress.rows:
            self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._parts:
            part.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all progress, so that the next run starts over."""
        self.close()
        self._remove_parts()
        if self.report.exists() or not self.data.exists():  # otherwise the state proves that this data is ours
            self._state.unlink(missing_ok=True)

    def finish(self, report: dict[str, Any]) -> None:
        """Rename the files. There is a file of dropped rows only if there are any."""
        self.close()
        self.report.unlink(missing_ok=True)  # it must never describe other data than what is there
        if self.progress.dropped:
            self._parts[1].replace(self.dropped)
        else:
            self.dropped.unlink(missing_ok=True)
            self._parts[1].unlink()
        self._parts[0].replace(self.data)
        write_json(self.report, report)
        self._state.unlink(missing_ok=True)


def claim(folder: Path, name: str, sources: Iterable[Path]) -> None:
    """Make sure that no file of the user will be overwritten.

    Raises:
        ValueError: a source is one of the files to write, or such a file exists and is not ours.
    """
    paths = {end: folder / f"{name}{end}" for end in (".jsonl", "_dropped.jsonl", "_report.json", "_state.json")}
    written = [path for path in paths.values() if path.exists()]
    for source in sources:
        if any(source.samefile(path) for path in written):
            raise ValueError(f"--source {source} is a file that this command writes; give another --dir.")
    if paths["_report.json"].exists() or paths["_state.json"].exists():
        return
    if written:
        raise ValueError(
            f"{written[0]} already exists, and no {name}_report.json says that this command made it; move it away, "
            "or give another --dir."
        )


def finished(folder: Path, name: str, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run with the same identity, if its data still exists."""
    try:
        report: dict[str, Any] = json.loads((folder / f"{name}_report.json").read_text(encoding="utf-8"))
        same = report["identity"] == identity and report["bytes"] == (folder / f"{name}.jsonl").stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if same else None


def _open_at(path: Path, length: int) -> Any:
    """Open a file for writing after its first `length` bytes; the rest is truncated."""
    file = path.open("r+b" if length else "wb")
    file.truncate(length)
    file.seek(length)
    return file


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    part = Path(f"{path}.tmp")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock file. If another process holds it: ValueError with the message `busy`, or wait if that is empty."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ValueError(busy) from None
        yield


def registered(folder: Path, name: str) -> dict[str, Any]:
    """All entries in the `dataset_info.json` of a folder; {} if there is no such file.

    Raises:
        ValueError: it cannot be read, or describes another dataset under this name.
    """
    path = folder / INFO_NAME
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); repair or remove it, and run again.") from None
    if not isinstance(known, dict):
        raise ValueError(f"{path} does not hold an object; repair or remove it, and run again.")
    if name in known and not _is_ours(known[name], f"{name}.jsonl"):
        raise ValueError(
            f"{path} has an entry {name} that this command did not make; rename or remove it, or give another --dir."
        )
    return known


def _is_ours(entry: Any, file_name: str) -> bool:
    """Whether LLaMA-Factory would read our file for this entry; it prefers a hub or a script."""
    return (
        isinstance(entry, Mapping)
        and entry.get("file_name") == file_name
        and not any(key in entry for key in ELSEWHERE)
    )


def register(folder: Path, name: str, images: bool) -> None:
    """Add `NAME.jsonl` to the `dataset_info.json` of a folder; other entries are kept.

    Raises:
        ValueError: as for `registered`.
    """
    columns = {"messages": "conversations", **({"images": "images"} if images else {})}
    with locked(folder / ".dataset_info.lock"):
        known = registered(folder, name)
        before = known.get(name, {})  # keep what a user has added
        known[name] = {**before, "file_name": f"{name}.jsonl", "formatting": "sharegpt", "columns": columns}
        write_json(folder / INFO_NAME, known)
