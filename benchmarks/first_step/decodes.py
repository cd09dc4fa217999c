"""Counts how often processes open and decode JPEG images, without any change to the programs that do it.

Python imports a module named `sitecustomize` at its start, wherever it finds one; `counting` puts such a module on the
path of all processes that are started meanwhile. It wraps Pillow's `Image.open`, and the place where Pillow decodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOG = "ODB_BENCHMARK_DECODES"
"""Environment variable: the file to which every process appends a byte for each event."""

OPEN, DECODE = b"o", b"d"

HOOK = f'''\
"""Counts openings and decodings of JPEG images; see benchmarks/first_step/decodes.py."""

import os

if "{LOG}" in os.environ:
    from PIL import Image, ImageFile

    # one byte in one write to a file opened for appending: processes do not disturb each other
    _log = os.open(os.environ["{LOG}"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    _open, _load = Image.open, ImageFile.ImageFile.load

    def counted_open(*args, **kwargs):
        image = _open(*args, **kwargs)
        if image.format == "JPEG":
            os.write(_log, {OPEN!r})
        return image

    def counted_load(self):
        # what is left to decode is in `tile`; a second call finds nothing there
        left = bool(self.tile) and self.format == "JPEG"
        pixels = _load(self)
        if left:
            os.write(_log, {DECODE!r})
        return pixels

    Image.open, ImageFile.ImageFile.load = counted_open, counted_load
'''


@dataclass
class Counts:
    """Of all processes together; filled when `counting` ends."""

    opened: int = 0
    decoded: int = 0


@contextlib.contextmanager
def counting(folder: Path) -> Iterator[Counts]:
    """Count in the Python processes that are started within the block; `folder` is made for what that needs."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    log = folder / "events"
    log.touch()
    counts = Counts()
    with _environment({LOG: str(log), "PYTHONPATH": os.pathsep.join(_with_path(folder))}):
        yield counts
    events = log.read_bytes()
    counts.opened, counts.decoded = events.count(OPEN), events.count(DECODE)


def _with_path(folder: Path) -> list[str]:
    return [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables, and have them as they were afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
