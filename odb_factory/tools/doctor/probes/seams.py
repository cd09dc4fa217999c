"""Imports LLaMA-Factory as a run does, and reports whether our hooks took effect and each seam fits."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from typing import Any

from odb_factory.llamafactory import seams
from odb_factory.tools.doctor.process import answer


def look() -> dict[str, Any]:
    """`version` and `seams`: by name, what does not fit (None: it fits); `installed`: the seams that are replaced now;
    `known`: whether `odb` is a field of a recipe; `warnings`: what the hooks warned about."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seam in seams.SEAMS:  # in the order of a run; a failure is found again by the check below
            with contextlib.suppress(Exception):
                importlib.import_module(seam.module)
        said += [str(w.message) for w in caught if "odb-factory" in str(w.message)]
    return {
        "version": _problem(seams.check_version),
        "seams": {str(seam): _seam_problem(seam) for seam in seams.SEAMS},
        "installed": [str(seam) for seam in seams.registry.installed],
        "known": _odb_is_known(),
        "warnings": said,
    }


def _seam_problem(seam: seams.Seam) -> str | None:
    if seam in seams.registry.installed:
        return None  # it was checked before it was replaced
    return _problem(seam.check)


def _problem(check: Any) -> str | None:
    try:
        check()
    except Exception as error:  # whatever an unknown layout leads to
        text = str(error).splitlines() or [""]
        return text[0] if isinstance(error, seams.SeamError) else f"{type(error).__name__}: {text[0]}"
    return None


def _odb_is_known() -> bool:
    with contextlib.suppress(Exception):
        classes = importlib.import_module(seams.TRAIN_ARGS.module)._TRAIN_ARGS
        return any(field.name == "odb" for one in classes for field in dataclasses.fields(one))
    return False


if __name__ == "__main__":
    answer(look())
