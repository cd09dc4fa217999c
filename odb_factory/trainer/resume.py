"""What of a run is saved beside each checkpoint, so that it goes on with exactly the samples that are left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from odb_factory.trainer.checkpoints import FIELD, STATE_NAME, checkpoints_in, fault_of


def save_state(directory: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `odb_state.json` into a checkpoint's directory, whole or not at all; the directory is made if missing."""
    path = Path(directory) / STATE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".tmp{os.getpid()}")
    scratch.write_text(json.dumps(state) + "\n", encoding="utf-8")
    scratch.replace(path)


def load_state(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a checkpoint's directory.

    Raises:
        ValueError: there is none, or it cannot be read, or the checkpoint is none or not complete.
    """
    if fault := fault_of(checkpoint):
        raise ValueError(f"odb: {fault}")
    path = Path(checkpoint) / STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"odb: {path} cannot be read ({error}); resume from another checkpoint.") from None
    if not isinstance(state, dict) or not {"loader", "progress", "audit"} <= set(state):
        raise ValueError(f"odb: {path} is not a state of this version of odb-factory; resume from another checkpoint.")
    return state


def find_state(resume: Any, output_dir: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run goes on from, and its state, without loading anything; None: it begins anew.

    Args:
        resume: `resume_from_checkpoint`: a path, or true for the last checkpoint in `output_dir`.

    Raises:
        ValueError: see `load_state`; or there is no checkpoint in `output_dir`, or `resume` is something else.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        found = checkpoints_in(output_dir)
        if not found:
            raise ValueError(
                f"odb: {FIELD} is true, and there is no checkpoint in output_dir {output_dir}; correct output_dir, or "
                f"remove {FIELD}."
            )
        resume = found[0]
    if not isinstance(resume, str | os.PathLike):
        raise ValueError(f"odb: {FIELD} must be true or the path of a checkpoint, got {resume!r}; correct it.")
    return Path(resume), load_state(resume)
