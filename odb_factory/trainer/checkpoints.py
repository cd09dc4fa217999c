"""A path that a run cannot go on from: what is wrong with it, and which checkpoints there are instead."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

STATE_NAME = "odb_state.json"
"""Written first of all that a checkpoint holds."""

TRAINER_STATE_NAME = "trainer_state.json"
"""Written by the Trainer behind weights and optimizer: a directory without it is no whole checkpoint."""

FILES = (STATE_NAME, TRAINER_STATE_NAME)
"""What a complete checkpoint of a run with `odb: true` has."""

RUN_FILES = ("odb_summary.json", "all_results.json")
"""What a run leaves in its output_dir when it ends, and never in a checkpoint."""

FIELD = "resume_from_checkpoint"

MOST_NAMED = 5
"""Checkpoints that a sentence names, at most."""

START_ANEW = "start anew in another output_dir (overwrite_output_dir: true in the same one)"

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints_in(directory: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of an output_dir, complete or not, the latest first; none where it cannot be read."""
    try:
        found = [(int(match[1]), path) for path in Path(directory).iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def fault_of(checkpoint: str | os.PathLike[str]) -> str | None:
    """Why a run with `odb: true` cannot go on from there, in a sentence with the remedy; None: nothing is missing."""
    path, given = Path(checkpoint), os.fspath(checkpoint)
    if not os.path.exists(given):
        relative = "" if path.is_absolute() else f", relative to {os.getcwd()}"
        return f"there is no checkpoint {given or repr(given)} ({FIELD}{relative}); {_beside(path)}."
    if not os.path.isdir(path):
        return f"{given} ({FIELD}) is a file, while a checkpoint is a directory; {_beside(path)}."
    begun, whole = (os.path.isfile(path / name) for name in FILES)
    if begun and whole:
        return None
    if begun:
        return (
            f"the checkpoint {given} is incomplete: it has no {TRAINER_STATE_NAME}, which is written last, so its run "
            f"ended while it was being saved; {_beside(path, START_ANEW)}."
        )
    if instead := as_output_dir(path):
        return f"{given} ({FIELD}) is {instead}."
    if not whole:
        return f"{given} ({FIELD}) is no checkpoint, for it has no {TRAINER_STATE_NAME}; {_beside(path)}."
    if any(os.path.exists(path / name) for name in RUN_FILES):
        return (
            f"{given} ({FIELD}) is the output_dir of a run that left no checkpoint in it; name one that was saved "
            f"elsewhere, or {START_ANEW}."
        )
    return (
        f"the checkpoint {given} has no {STATE_NAME}, so it does not say which samples are done: it was saved without "
        f"odb: true. Resume it without odb, or {START_ANEW}."
    )


def as_output_dir(path: Path, files: Sequence[str] = FILES) -> str | None:
    """What to say of a directory that holds checkpoints instead of being one; None: it holds none.

    Args:
        files: what a complete checkpoint has.
    """
    found = checkpoints_in(path)
    return f"no checkpoint, but an output_dir that holds {_named(found)}: {_advice(found, files)}" if found else None


def _beside(path: Path, without: str = f"correct the path, or remove {FIELD} if there is nothing to go on from") -> str:
    """The checkpoints in the directory that should hold `path`, and what to do; `without`: where there are none."""
    directory = path.parent.parent if _NAME.fullmatch(path.parent.name) else path.parent
    where = os.getcwd() if directory == Path() else str(directory)
    if not os.path.isdir(directory):
        return f"there is no directory {where} either: correct the path"
    found = [other for other in checkpoints_in(directory) if other != path]
    if not found:
        return f"there is no other one in {where}: {without}"
    return f"{where} holds {_named(found)}: {_advice(found, FILES)}"


def _named(found: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in found[:MOST_NAMED])
    return names if len(found) <= MOST_NAMED else f"{names} and {len(found) - MOST_NAMED} more"


def _advice(found: Sequence[Path], files: Sequence[str]) -> str:
    """`found`: the latest first."""
    for path in found:
        if all(os.path.isfile(path / name) for name in files):
            return f"resume from {path}, the last complete one"
    what = "it is not complete" if len(found) == 1 else "none of them is complete"
    return f"{what}, or was saved without odb, so start anew"
