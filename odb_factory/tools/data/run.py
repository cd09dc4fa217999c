"""Prepares a dataset: read, convert, check, write; continues after an interruption, and accounts for every row."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.tools.data.images import MISSING_REASONS, NOT_FOUND, MissingImage
from odb_factory.tools.data.output import Output, claim, finished, locked, register, registered
from odb_factory.tools.data.rows import Broken
from odb_factory.tools.data.sets import IMAGE, PublicSet, Sample, Unusable
from odb_factory.tools.data.source import Source, local_copy, published

VERSION = 1
"""Version of the conversion; data of another version is converted again."""

CHUNK = 256
"""Rows between two commits: the most work that an interruption loses."""

SHOWN = 100
"""Characters of a dropped row that are kept to identify it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to prepare, from where and to where."""

    known: PublicSet
    folder: Path
    limit: int | None = None
    """Number of rows to read; None: all."""
    source: Path | None = None
    """A local copy; None: as published."""

    @property
    def images(self) -> Path:
        """The folder for downloaded or unpacked images."""
        return self.folder / f"{self.known.name}_images"


def prepare(job: Job) -> dict[str, Any]:
    """Prepare a dataset and return the report: rows, written, dropped by reason, images, and whether it is `new`.

    Raises:
        ValueError: bad input, or no row can be used.
        OSError: something cannot be downloaded, read or written. The same call continues where this one stopped.
    """
    try:
        return _prepare(job)
    except OSError as error:
        if error.errno is None:  # its message is a sentence already
            raise
        raise OSError(_sentence(error, job.folder)) from error


def _sentence(error: OSError, folder: Path) -> str:
    """The system's message, the path, and what to do."""
    again = "run the same command again: it continues where this one stopped."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"there is no room left for {folder} ({error.strerror}); make room, and {again}"
    return f"{error.filename or folder}: {error.strerror}; fix that, and {again}"


def _prepare(job: Job) -> dict[str, Any]:
    if job.limit is not None and job.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {job.limit}.")
    name = job.known.name
    # check a local copy before creating anything
    local = local_copy(job.known, job.source, job.images) if job.source is not None else None
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--dir {job.folder} is a file or lies below one; give a folder.") from None
    busy = f"another process prepares {name} in {job.folder}; wait for it, or give another --dir."
    with locked(job.folder / f".{name}.lock", busy):
        claim(job.folder, name, local.local if local is not None else ())
        registered(job.folder, name)
        source = local or published(job.known, job.folder / f"{name}_raw", job.images)
        identity = {"version": VERSION, "limit": job.limit, "origin": source.origin}
        report = _earlier(job, identity)
        new = report is None
        if report is None:
            report = _convert(job, source, identity)
        register(job.folder, name, job.known.has_images)
    return {**report, "new": new}


def _earlier(job: Job, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run, if nothing is left to do; images missing then may exist now."""
    report = finished(job.folder, job.known.name, identity)
    if report is None or MISSING_REASONS & report["dropped"].keys():
        return None
    try:
        _verified(job.folder / f"{job.known.name}.jsonl", job.folder, report["written"])
    except ValueError:
        return None
    return report


def _convert(job: Job, source: Source, identity: dict[str, Any]) -> dict[str, Any]:
    source.files[0]()  # download errors should come before anything is written
    output = Output(job.folder, job.known.name, identity)
    with closing(output):
        _transfer(job, source, output)
        progress = output.progress
        try:
            counts = _verified(output.part, job.folder, progress.written)
        except ValueError:
            output.discard()
            raise
        if not progress.written:
            output.discard()
            reasons = ", ".join(f"{count} x {reason}" for reason, count in progress.dropped.most_common(3))
            raise ValueError(
                f"none of the {progress.rows} rows can be used ({reasons or 'there are none'}); give {job.known.local}."
            )
        report = {
            "identity": identity,
            "rows": progress.rows,
            "written": progress.written,
            "dropped": dict(progress.dropped.most_common()),
            "bytes": progress.data_bytes,
            **counts,
        }
        output.finish(report)
    return report


def _transfer(job: Job, source: Source, output: Output) -> None:
    """Convert the rows from the source to the output, chunk by chunk."""
    from tqdm import tqdm

    done, limit = output.progress.rows, job.limit
    rows = itertools.islice(
        enumerate(source.rows(job.known.columns, done), start=done), None if limit is None else max(0, limit - done)
    )
    total = min((count for count in (source.count, limit) if count is not None), default=None)
    with tqdm(total=total, initial=done, unit=" rows", desc=job.known.name) as bar:
        if done:
            bar.write(f"continuing an interrupted run after row {done:,}", file=sys.stderr)
        for chunk in _chunks(rows):
            samples, dropped = _converted(job, source, chunk)
            if not output.progress.rows and not samples and _no_images(source, dropped):
                raise ValueError(f"none of the first {len(chunk)} images is there; give {job.known.local}.")
            output.commit(len(chunk), samples, dropped)
            bar.update(len(chunk))
            bar.set_postfix(dropped=sum(output.progress.dropped.values()))
        bar.total = bar.n  # a local copy may have fewer rows than the published dataset


def _no_images(source: Source, dropped: list[dict[str, Any]]) -> bool:
    """Whether the source has no images at all, which means that the user gave the wrong folder."""
    not_found = {item["reason"] for item in dropped} == {NOT_FOUND}
    return not_found and source.images is not None and not source.images.any()


def _chunks(rows: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    while chunk := list(itertools.islice(rows, CHUNK)):
        yield chunk


def _converted(
    job: Job, source: Source, chunk: list[tuple[int, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The samples and dropped rows of a chunk, as written to the output."""
    results = [_result(job, raw) for _, raw in chunk]
    names = {name for result in results if isinstance(result, Sample) for name in result.images}
    files = source.images.get(names) if source.images is not None else {}
    samples, dropped = [], []
    problem: Unusable | MissingImage | None
    for (number, raw), result in zip(chunk, results, strict=True):
        if isinstance(result, Sample):
            images = [files[name] for name in result.images]
            problem = next((image for image in images if isinstance(image, MissingImage)), None)
        else:
            images, problem = [], result
        if problem is not None:
            dropped.append({"row": number, "reason": str(problem), **_known_by(job, raw)})
        elif isinstance(result, Sample):
            written = {"images": [_written(image, job.folder) for image in images]} if images else {}
            samples.append({"conversations": result.conversations, **written})
    return samples, dropped


def _result(job: Job, raw: Any) -> Sample | Unusable:
    """The conversion of a raw row, without its images."""
    if isinstance(raw, Broken):
        return Unusable(raw.reason)
    try:
        return job.known.converter(raw)
    except Unusable as reason:
        return reason


def _known_by(job: Job, raw: Any) -> dict[str, str]:
    """What identifies a dropped row to a user."""
    if isinstance(raw, Broken):
        return {"text": raw.text[:SHOWN]}
    named = raw.get(job.known.id_column) if isinstance(raw, dict) else None
    try:
        text = {"text": json.dumps(raw, default=str)[:SHOWN]}
    except RecursionError:
        text = {"text": "(nested too deeply to show)"}
    return {"id": str(named)[:SHOWN], **text} if named is not None else text


def _written(path: Any, folder: Path) -> str:
    """An image's path for LLaMA-Factory: relative if it is below the folder, else absolute."""
    # links are not resolved: the target may be a blob without a suffix
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def _verified(data: Path, folder: Path, written: int) -> dict[str, int]:
    """Count the placeholders and image files of the written data, and compare with what was expected.

    Raises:
        ValueError: the counts do not agree, or an image file does not exist.
    """
    rows = placeholders = references = 0
    listed: set[str] = set()
    with data.open(encoding="utf-8") as file:
        for line in file:
            sample = json.loads(line)
            names = sample.get("images", [])
            marks = sum(turn["value"].count(IMAGE) for turn in sample["conversations"])
            if marks != len(names):
                raise ValueError(f"row {rows} of {data} has {marks} <image> and {len(names)} images.")
            rows, placeholders, references = rows + 1, placeholders + marks, references + len(names)
            listed.update(names)
    missing = [name for name in sorted(listed) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(listed)} images no longer exist, the first is {missing[0]}; did something "
            "remove them meanwhile? Run again."
        )
    if rows != written:
        raise ValueError(f"{data} has {rows} rows instead of {written}; remove it and run again.")
    return {"placeholders": placeholders, "images": len(listed)}
