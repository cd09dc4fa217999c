"""Environment variables that change what a run does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

OTHER_TRAINERS = {
    "USE_V1": "starts LLaMA-Factory's v1, which does not know `odb:`",
    "USE_MCA": "starts the Megatron trainer, which does not know `odb:`",
}

DOUBTFUL = {
    "USE_RAY": "starts ranks through Ray, which odb-factory was not tested with",
    "ALLOW_EXTRA_ARGS": "lets a misspelt recipe field, such as an `odb_` one, pass without a word",
    "DISABLE_VERSION_CHECK": "hides that packages are outside the ranges of LLaMA-Factory",
    "CUDA_LAUNCH_BLOCKING": "makes the CPU wait for each GPU kernel, which is slow",
}

TOLD = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "FORCE_TORCHRUN", "OMP_NUM_THREADS")
"""Worth a mention."""


def check_variables(machine: Machine) -> Iterator[Check]:
    """Variables that send a run elsewhere, or hide what is wrong."""
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
    """Whether a variable is switched on, as LLaMA-Factory reads it, in v0 or v1."""
    return environ.get(name, "").lower() in ("true", "yes", "on", "t", "y", "1")
