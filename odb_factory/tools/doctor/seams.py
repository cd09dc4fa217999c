"""The places in LLaMA-Factory that odb-factory replaces, as a fresh process finds them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from odb_factory.llamafactory.hooks import RUN_SFT, TESTED_VERSIONS, TRAIN_ARGS
from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok

REINSTALL = f'pip install --force-reinstall --no-deps "llamafactory=={TESTED_VERSIONS[-1]}"'


def check_seams(machine: Machine) -> Iterator[Check]:
    """LLaMA-Factory's version, each seam, and whether a recipe may say `odb:`."""
    seen = machine.probe("seams")
    if seen["version"]:
        yield fail("seams", seen["version"], REINSTALL)
    for seam, problem in seen["seams"].items():
        if problem:
            yield fail("seams", problem if seam in problem else f"{seam}: {problem}", REINSTALL)
        else:
            when = "replaced" if seam in seen["installed"] else "fits"
            yield ok("seams", f"{seam} {when}")
    missing = [str(seam) for seam in (TRAIN_ARGS, RUN_SFT) if str(seam) not in seen["installed"]]
    if seen["known"] and not missing:
        yield ok("seams", f"`odb:` is a recipe field of LLaMA-Factory {importlib.metadata.version('llamafactory')}")
    else:
        said = f" ({seen['warnings'][0]})" if seen["warnings"] else ""
        what = (
            "is not a recipe field" if not seen["known"] else f"would have no effect, {', '.join(missing)} is untouched"
        )
        yield fail("seams", f"`odb:` {what}{said}", "See the checks `hook`, `versions` and the seams above.")
