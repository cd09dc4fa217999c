"""The images of a dataset: found in folders, unpacked from an archive or downloaded; each is decoded as a check."""

from __future__ import annotations

import errno
import os
import threading
import time
import urllib.parse
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path, PurePosixPath

THREADS = 16
"""Images that are fetched concurrently."""

DECODERS = 4
"""Images that are decoded concurrently; a large one takes some hundred megabytes."""

ATTEMPTS = 3
"""Attempts per image, if the server has delivered one before; otherwise one."""

SECONDS = 10.0
"""How long a server may take to respond."""

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}
"""Suffixes of image files, for finding out whether there are any images at all."""

ENTRIES = 10_000
"""Most folders that are searched for any image; the root may be a user's home directory."""

NOT_FOUND = "image not found"
UNDECODABLE = "image that cannot be decoded"
DAMAGED = "image that is damaged in the archive"
MISSING_REASONS = {NOT_FOUND, UNDECODABLE, DAMAGED}
"""All reasons of `MissingImage`."""


class MissingImage(Exception):
    """An image is missing or unusable; the message is one of a few fixed reasons."""


class Images(ABC):
    """Images by their names in the dataset."""

    @abstractmethod
    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        """A readable file for each name, or the reason why there is none.

        Raises:
            ValueError: the archive is broken as a whole.
            OSError: unknown, because a server or a disk failed.
        """

    @abstractmethod
    def any(self) -> bool:
        """Whether there is any image at all, under any name."""


class Place(Images):
    """One location of images; each image is looked up and decoded once."""

    def __init__(self) -> None:
        self._known: dict[str, Path | MissingImage] = {}
        self._decoders = threading.Semaphore(DECODERS)

    @abstractmethod
    def locate(self, name: str) -> Path:
        """The file of an image, created if necessary; runs in several threads.

        Raises:
            MissingImage: there is no such image.
            OSError: unknown, because a server or a disk failed.
        """

    def kept(self, name: str) -> Path | None:
        """The file that an earlier run created, if there is one."""
        return None

    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        wanted = set(names)
        new = sorted(wanted - self._known.keys())
        if new:
            pool = ThreadPoolExecutor(THREADS)
            try:
                with warnings.catch_warnings():  # here, since warning filters are shared by all threads
                    warnings.simplefilter("ignore")  # Pillow warns about metadata and sizes; real problems raise
                    self._known.update(zip(new, pool.map(self._checked, new), strict=True))
            finally:
                pool.shutdown(cancel_futures=True)
        return {name: self._known[name] for name in wanted}

    def _checked(self, name: str) -> Path | MissingImage:
        try:
            kept = self.kept(name)
            if kept is not None and self._decodes(kept):
                return kept
            path = self.locate(name)  # also if the kept file is truncated, as after a power failure
            with self._decoders:
                _decode(path)
        except MissingImage as reason:
            return reason
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return MissingImage(NOT_FOUND)
            raise
        return path

    def _decodes(self, path: Path) -> bool:
        try:
            with self._decoders:
                _decode(path)
        except MissingImage:
            return False
        return True


def _decode(path: Path) -> None:
    """Decode the whole image (JPEG at an eighth of its size, which still detects truncation)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
    except Exception as error:  # Pillow's decoders may raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the image
        raise MissingImage(UNDECODABLE) from None


class Folders(Place):
    """Images in one of several folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self._folders = folders

    def locate(self, name: str) -> Path:
        for folder in self._folders:
            path = folder / name
            if path.is_file():
                return path
        raise MissingImage(NOT_FOUND)

    def any(self) -> bool:
        for folder in self._folders:
            for _, _, files in islice(os.walk(folder), ENTRIES):
                if any(_is_image(name) for name in files):
                    return True
        return False


class Archive(Place):
    """Images in a zip file, found by name in any of its folders, and written to `target` once."""

    def __init__(self, archive: Path, target: Path) -> None:
        """ValueError if `archive` is not a zip file."""
        super().__init__()
        try:
            self._zip = zipfile.ZipFile(archive)
        except zipfile.BadZipFile:
            raise ValueError(f"{archive} is not a whole zip file; download it again, or move it away.") from None
        self._target = target
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in self._zip.infolist():
            parts = PurePosixPath(member.filename).parts
            for start in range(len(parts)):
                self._members.setdefault("/".join(parts[start:]), member)

    def any(self) -> bool:
        return any(_is_image(name) for name in self._members)

    def kept(self, name: str) -> Path | None:
        return _file(self._target / name)

    def locate(self, name: str) -> Path:
        member = self._members.get(name)
        if member is None or member.is_dir():
            raise MissingImage(NOT_FOUND)
        try:
            content = self._zip.read(member)
        except Exception as error:  # the decompressors may raise anything
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk, not the archive
            raise MissingImage(DAMAGED) from None
        return _write(self._target / name, content)


class Web(Place):
    """Images on a web server under `base`, written to `target` once."""

    def __init__(self, base: str, target: Path, instead: str) -> None:
        """`instead`: a sentence about what to do if the server cannot be reached."""
        import httpx

        super().__init__()
        self._base, self._target, self._instead = base, target, instead
        self._client = httpx.Client(timeout=SECONDS, follow_redirects=True)
        self._answered = False

    def any(self) -> bool:
        return self._answered

    def kept(self, name: str) -> Path | None:
        return _file(self._target / name)

    def locate(self, name: str) -> Path:
        import httpx

        url = self._base + urllib.parse.quote(name)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._client.get(url)
            except httpx.RequestError as error:  # also for a truncated response
                problem = str(error) or type(error).__name__
            else:
                if answer.is_success:
                    self._answered = True
                    return _write(self._target / name, answer.content)
                if answer.status_code in (403, 404, 410):
                    raise MissingImage(NOT_FOUND)
                problem = f"HTTP status {answer.status_code} {answer.reason_phrase}"
            if not self._answered:
                break
            time.sleep(attempt)
        raise OSError(f"could not fetch {url} ({problem}). {self._instead}")


class Several(Images):
    """Several locations; each is opened and searched only for images missing in those before it."""

    def __init__(self, places: Sequence[Callable[[], Images]]) -> None:
        self._closed = list(places)
        self._opened: list[Images] = []

    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        found: dict[str, Path | MissingImage] = {}
        wanted = set(names)
        for place in self._places():
            for name, image in place.get(wanted).items():
                before = found.get(name)
                if before is None or isinstance(image, Path) or str(before) == NOT_FOUND:  # other reasons say more
                    found[name] = image
            wanted = {name for name in wanted if isinstance(found[name], MissingImage)}
            if not wanted:
                break
        return found

    def any(self) -> bool:
        return any(place.any() for place in self._places())

    def _places(self) -> Iterator[Images]:
        yield from self._opened
        while self._closed:
            self._opened.append(self._closed[0]())
            del self._closed[0]
            yield self._opened[-1]


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _write(path: Path, content: bytes) -> Path:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{path}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else a power failure may leave an empty file
    os.replace(part, path)
    return path
