"""The images of a dataset: found in a folder, taken out of an archive or fetched one by one; each decoded once."""

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
"""Images that are fetched at once."""

DECODERS = 4
"""Images that are decoded at once; a large one takes some hundred megabytes."""

ATTEMPTS = 3
"""How often an image is asked for, from a server that has given one before; a silent one is given up at once."""

SECONDS = 10.0
"""How long a server may be silent."""

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}
"""Of files that are taken for images where it only matters whether there are any."""

ENTRIES = 10_000
"""Folders that are looked into for any image; a user's home may be among them."""

NOT_FOUND = "image not found"
UNDECODABLE = "image that cannot be decoded"
DAMAGED = "image that is damaged in the archive"
MISSING_REASONS = {NOT_FOUND, UNDECODABLE, DAMAGED}
"""Why an image cannot be had: all reasons of `MissingImage`."""


class MissingImage(Exception):
    """An image that cannot be had; the text is the reason, the same for every image of its kind."""


class Images(ABC):
    """Images by the names that the dataset gives them."""

    @abstractmethod
    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        """A readable file for each name, or why there is none.

        Raises:
            ValueError: what should hold them is broken as a whole.
            OSError: nothing can be said, since a server or a disk does not answer.
        """

    @abstractmethod
    def any(self) -> bool:
        """Whether there is any image at all, whatever its name."""


class Place(Images):
    """One place where images are; each is looked for and decoded once."""

    def __init__(self) -> None:
        self._known: dict[str, Path | MissingImage] = {}
        self._decoders = threading.Semaphore(DECODERS)

    @abstractmethod
    def locate(self, name: str) -> Path:
        """The file of an image, made if need be; runs in several threads.

        Raises:
            MissingImage: there is no such image.
            OSError: nothing can be said, since a server or a disk does not answer.
        """

    def kept(self, name: str) -> Path | None:
        """The file that an earlier run has made, if there is one."""
        return None

    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        wanted = set(names)
        new = sorted(wanted - self._known.keys())
        if new:
            pool = ThreadPoolExecutor(THREADS)
            try:
                with warnings.catch_warnings():  # here, since it is for all threads at once
                    warnings.simplefilter("ignore")  # Pillow's about metadata and sizes; what matters raises
                    self._known.update(zip(new, pool.map(self._checked, new), strict=True))
            finally:
                pool.shutdown(cancel_futures=True)
        return {name: self._known[name] for name in wanted}

    def _checked(self, name: str) -> Path | MissingImage:
        try:
            kept = self.kept(name)
            if kept is not None and self._decodes(kept):
                return kept
            path = self.locate(name)  # also instead of a kept one that is cut off, as a power failure leaves it
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
    """Read the whole image, JPEG at an eighth of its size, which still notices one that is cut off."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
    except Exception as error:  # Pillow's decoders raise whatever the bytes lead them to
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the image
        raise MissingImage(UNDECODABLE) from None


class Folders(Place):
    """Images that lie in one of several folders."""

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
    """Images in a zip file, found by name wherever they lie in it, and written to `target` once."""

    def __init__(self, archive: Path, target: Path) -> None:
        """ValueError if `archive` is no zip file."""
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
        except Exception as error:  # the decompressors raise whatever the bytes lead them to
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk, not the archive
            raise MissingImage(DAMAGED) from None
        return _write(self._target / name, content)


class Web(Place):
    """Images that a web server has under `base`, written to `target` once."""

    def __init__(self, base: str, target: Path, instead: str) -> None:
        """`instead`: what to do where the server cannot be reached, a sentence."""
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
            except httpx.RequestError as error:  # also of an answer that is cut off
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
    """Several places, each asked for what those before it lack, and opened only then."""

    def __init__(self, places: Sequence[Callable[[], Images]]) -> None:
        self._closed = list(places)
        self._opened: list[Images] = []

    def get(self, names: Iterable[str]) -> dict[str, Path | MissingImage]:
        found: dict[str, Path | MissingImage] = {}
        wanted = set(names)
        for place in self._places():
            for name, image in place.get(wanted).items():
                before = found.get(name)
                if before is None or isinstance(image, Path) or str(before) == NOT_FOUND:  # others say more
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
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{path}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else a power failure may leave the name without the bytes
    os.replace(part, path)
    return path
