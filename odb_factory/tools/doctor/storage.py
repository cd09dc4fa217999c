"""Folders that a run writes besides its output: temporary files and Hugging Face's cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

LONGEST_TEMPORARY = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Characters: what the path of a socket may have, less what multiprocessing puts below the folder."""

GOOD_FREE = 5 * 2**30
"""Bytes of room in the cache: an 8B model alone takes 16 GB, but may lie elsewhere."""


def check_storage(machine: Machine) -> Iterator[Check]:
    """The folder for temporary files, and the one where `datasets` keeps what it has converted."""
    yield _check_temporary(machine)
    yield _check_cache(cache_folder(machine))


def _check_temporary(machine: Machine) -> Check:
    wanted = machine.environ.get("TMPDIR", "")
    if wanted and (reason := _unwritable(Path(wanted))):
        return warn(
            "storage", f"TMPDIR={wanted} cannot be used: {reason}", "Set TMPDIR to a folder that can be written."
        )
    folder = Path(wanted or tempfile.gettempdir())
    if len(str(folder)) > LONGEST_TEMPORARY:
        return warn(
            "storage",
            f"the path of {folder} has {len(str(folder))} characters: an evaluation with workers would end with "
            "'AF_UNIX path too long'",
            "export TMPDIR=/tmp",
        )
    if reason := _unwritable(folder):
        return fail(
            "storage", f"no temporary files in {folder}: {reason}", "Set TMPDIR to a folder that can be written."
        )
    return ok("storage", f"temporary files in {folder}, {_free(folder)} free")


def cache_folder(machine: Machine) -> Path:
    """Where `datasets` keeps what it has converted."""
    environ = machine.environ
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"])
    home = Path(environ.get("HOME") or Path.home())
    base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(environ.get("HF_HOME") or base / "huggingface").expanduser() / "datasets"


def _check_cache(folder: Path) -> Check:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    move = "Set HF_HOME to a folder that can be written and has room, or cache_dir in the recipe."
    if reason := _unwritable(there):
        return fail("storage", f"data sets cannot be cached in {folder}: {reason}", move)
    found = f"data sets are cached in {folder}, {_free(there)} free"
    return ok("storage", found) if shutil.disk_usage(there).free >= GOOD_FREE else warn("storage", found, move)


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in a folder; None: one could."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
