"""Checks of Python, the installed packages and environment variables."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

PACKAGE = "odb-factory"

INDIRECT = ("accelerate", "tokenizers")
"""Indirect requirements that matter; their ranges are those stated by the packages that odb-factory requires."""

OPTIONAL = {"deepspeed": "only recipes with `deepspeed:` need it"}
"""Packages that only some runs need."""

REASONS = {
    "torch": ("==2.9.*", "torch 2.9 is refused by LLaMA-Factory for Qwen3-VL, whose Conv3d it slows down"),
    "deepspeed": ("<0.19.8", "before 0.19.8, ZeRO-2 and ZeRO-3 accumulate gradients wrongly with a current torch"),
}
"""Versions with a known problem, and the problem."""


def check_python(machine: Machine) -> Iterator[Check]:
    """The version of Python."""
    from packaging.specifiers import SpecifierSet

    needed = SpecifierSet(importlib.metadata.metadata(PACKAGE)["Requires-Python"])
    found = f"Python {platform.python_version()} at {sys.executable}"
    if needed.contains(platform.python_version(), prereleases=True):
        yield ok("python", found)
    else:
        yield fail("python", f"{found} is outside {needed}", f"Make an environment with Python {needed}.")


def check_versions(machine: Machine) -> Iterator[Check]:
    """The installed packages against their tested ranges, a line each."""
    try:
        ranges = tested_ranges()
    except importlib.metadata.PackageNotFoundError:
        yield fail(
            "versions",
            f"{PACKAGE} is not installed in this Python, its files only lie on the import path",
            f"{machine.python} -m pip install {PACKAGE} (or -e and its folder).",
        )
        return
    for name, wanted in ranges.items():
        yield _judge(name, wanted)


def tested_ranges() -> dict[str, str]:
    """By package: the tested versions (a PEP 440 specifier), from odb-factory's own metadata.

    Raises:
        PackageNotFoundError: odb-factory is not installed.
    """
    direct = _requirements(PACKAGE)
    indirect: dict[str, list[str]] = {name: [] for name in INDIRECT}
    for package in direct:
        try:
            theirs = _requirements(package)
        except importlib.metadata.PackageNotFoundError:  # reported in its own line
            continue
        for name in INDIRECT:
            if theirs.get(name):
                indirect[name].append(theirs[name])
    return direct | {name: ",".join(parts) for name, parts in indirect.items()}


def _requirements(package: str) -> dict[str, str]:
    """A package's requirements on this platform, without extras: name to specifier."""
    from packaging.requirements import Requirement

    required = map(Requirement, importlib.metadata.requires(package) or [])
    return {r.name: str(r.specifier) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}


def _judge(name: str, wanted: str) -> Check:
    from packaging.specifiers import SpecifierSet

    bad = warn if name in OPTIONAL else fail
    why = f" ({OPTIONAL[name]})" if name in OPTIONAL else ""
    remedy = f'pip install "{name}{wanted}"{why}.'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return bad("versions", f"{name} is not installed", remedy)
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("versions", f"{name} {version}" + (f" ({wanted})" if wanted else ""))
    which, what = REASONS.get(name, ("", ""))
    reason = f": {what}" if what and SpecifierSet(which).contains(version, prereleases=True) else ""
    return bad("versions", f"{name} {version} is outside the tested range {wanted}{reason}", remedy)


OTHER_TRAINERS = {
    "USE_V1": "starts LLaMA-Factory's v1, which does not know `odb:`",
    "USE_MCA": "starts the Megatron trainer, which does not know `odb:`",
}

DOUBTFUL = {
    "USE_RAY": "starts ranks through Ray, which odb-factory was not tested with",
    "ALLOW_EXTRA_ARGS": "lets a misspelt recipe field, such as an `odb_` one, pass without a warning",
    "DISABLE_VERSION_CHECK": "hides that packages are outside the ranges of LLaMA-Factory",
    "CUDA_LAUNCH_BLOCKING": "makes the CPU wait for each GPU kernel, which is slow",
}

TOLD = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "FORCE_TORCHRUN", "OMP_NUM_THREADS")
"""Variables to mention if they are set."""


def check_variables(machine: Machine) -> Iterator[Check]:
    """Variables that select another trainer or hide problems."""
    bad = {name: effect for name, effect in OTHER_TRAINERS.items() if is_on(machine.environ, name)}
    doubtful = {name: effect for name, effect in DOUBTFUL.items() if is_on(machine.environ, name)}
    if bad.pop("USE_V1", None):
        doubtful["USE_V1"] = "starts LLaMA-Factory's v1, where `batching_strategy: odb` stands for `odb: true`"
    for name, effect in bad.items():
        yield fail("variables", f"{name}={machine.environ[name]} {effect}", f"unset {name}")
    for name, effect in doubtful.items():
        yield warn("variables", f"{name}={machine.environ[name]} {effect}", f"unset {name}")
    if not bad and not doubtful:
        told = ", ".join(f"{name}={machine.environ[name]}" for name in TOLD if name in machine.environ)
        yield ok("variables", told or "none that matters is set")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable is on, as LLaMA-Factory v0 or v1 reads it."""
    return environ.get(name, "").lower() in ("true", "yes", "on", "t", "y", "1")
