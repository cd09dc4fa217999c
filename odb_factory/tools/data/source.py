"""The source of the raw data: a local copy, or the published dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from odb_factory.tools.data.hub import hub_file
from odb_factory.tools.data.images import Archive, Folders, Images, Several, Web
from odb_factory.tools.data.rows import KINDS, count_parquet, read_rows
from odb_factory.tools.data.sets import PublicSet

SHARD = re.compile(r"-(\d+)-of-(\d+)")


@dataclass(frozen=True, slots=True)
class Source:
    """The raw rows and images of a dataset."""

    files: Sequence[Callable[[], Path]]
    """The row files in order; calling one downloads it if necessary."""
    images: Images | None
    origin: list[Any]
    """Identifies this source (JSON values)."""
    count: int | None = None
    """Number of rows, if known in advance."""
    optional: Sequence[str] = ()
    """Columns of a Parquet file to read if it has them."""
    local: Sequence[Path] = ()
    """The row files of a local copy."""

    def rows(self, columns: Sequence[str], skip: int) -> Iterator[Any]:
        """All rows after the first `skip`."""
        for file in self.files:
            path = file()
            if path.suffix == ".parquet" and skip and (count := count_parquet(path)) <= skip:
                skip -= count
                continue
            yield from read_rows(path, columns, skip, self.optional)
            skip = 0  # only Parquet datasets have several files


def published(known: PublicSet, raw: Path, target: Path) -> Source:
    """The published dataset; downloaded files go to `raw`, images to `target`.

    Raises:
        OSError: something cannot be downloaded.
    """
    instead = f"Point --source at a local copy ({known.local})."

    def fetch(name: str) -> Path:
        return hub_file(known.repository, name, known.revision, raw, instead)

    files = [partial(fetch, name) for name in known.files]
    origin: list[Any] = [known.repository, known.revision, *known.files]
    if known.revision is None:  # the file may change: its size identifies it
        origin += [file().stat().st_size for file in files]
    images: Images | None = None
    if known.archive is not None:
        images = Archive(fetch(known.archive), target)
    elif known.images_url is not None:
        images = Web(known.images_url, target, instead)
    return Source(files, images, origin, count=known.rows, optional=(known.id_column,))


def local_copy(known: PublicSet, path: Path, target: Path) -> Source:
    """A local copy: a folder as downloaded, or the row file with the images near it.

    Raises:
        ValueError: it does not exist, or is incomplete, ambiguous or of another kind.
    """
    if not path.exists():
        raise ValueError(f"--source {path} is not there; give {known.local}.")
    files = [path] if path.is_file() else _files(known, path)
    if files[0].suffix not in KINDS:
        raise ValueError(f"--source {path} is none of {', '.join(KINDS)}; give {known.local}.")
    folders = [path] if path.is_dir() else [path.parent, path.parent.parent]
    stats = [(file.name, file.stat()) for file in files]
    origin = [str(path.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    images = _images(known, folders, target) if known.has_images else None
    there = [partial(Path, file) for file in files]
    return Source(there, images, origin, count=_count(files), optional=(known.id_column,), local=files)


def _count(files: Sequence[Path]) -> int | None:
    """Number of rows, from the footers of Parquet files; None for other files, or if one is broken."""
    try:
        return sum(map(count_parquet, files)) if all(file.suffix == ".parquet" for file in files) else None
    except ValueError:  # reported when it is read: the files before it can be converted
        return None


def _files(known: PublicSet, folder: Path) -> list[Path]:
    found = sorted(
        file
        for file in folder.rglob(known.local_files)
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not found:
        raise ValueError(f"--source {folder} has no {known.local_files}; give {known.local}.")
    if len(known.files) == 1:
        if len(found) > 1:
            names = " and ".join(str(file.relative_to(folder)) for file in found[:2])
            have = f"--source {folder} has {len(found)} files {known.local_files} ({names})"
            raise ValueError(f"{have}; give one of them.")
        return found
    shards = [SHARD.search(file.name) for file in found]
    if all(shards):
        here = [int(shard[1]) for shard in shards if shard]
        total = max(int(shard[2]) for shard in shards if shard)
        if here != list(range(total)):
            have = f"--source {folder} has {len(found)} of {total} files {known.local_files}"
            what = "download the others, or give one file" if len(set(here)) == len(here) else "give one folder of them"
            raise ValueError(f"{have}; {what}.")
    return found


def _images(known: PublicSet, folders: Sequence[Path], target: Path) -> Images:
    """The images of a local copy: folders before archives, since an unpacked archive may still be there.

    Both are used, since a folder of that name may hold other images. If there is no folder, the archive is opened at
    once, else only for images missing in the folder.
    """
    places = [folder / name for folder in folders for name in known.image_folders if (folder / name).is_dir()]
    archives = [folder / name for folder in folders for name in known.image_archives if (folder / name).is_file()]
    if not places and not archives:
        return Folders([folder.resolve() for folder in folders])
    first = Folders([place.resolve() for place in places]) if places else Archive(archives.pop(0), target)
    return Several([lambda: first, *(partial(Archive, archive, target) for archive in archives)])
