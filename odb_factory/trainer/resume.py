"""What of a run is saved beside each checkpoint, so that it goes on with exactly the samples that are left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

STATE_NAME = "odb_state.json"


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
        ValueError: there is none, or it cannot be read.
    """
    path = Path(checkpoint) / STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"odb: the checkpoint {checkpoint} has no {STATE_NAME}, so it does not say which samples are done: it was "
            "saved without odb: true. Resume it without odb, or start anew in another output_dir "
            "(overwrite_output_dir: true in the same one)."
        ) from None
    except ValueError as error:
        raise ValueError(f"odb: {path} cannot be read ({error}); resume from another checkpoint.") from None
    if not isinstance(state, dict) or not {"loader", "progress", "audit"} <= set(state):
        raise ValueError(f"odb: {path} is not a state of this version of odb-factory; resume from another checkpoint.")
    return state
