"""All checks, in the order of the report: what is quick comes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from odb_factory.tools.doctor.accelerator import check_deepspeed, check_gpu
from odb_factory.tools.doctor.environment import check_python, check_variables, check_versions
from odb_factory.tools.doctor.hook import check_commands, check_hook, check_seams
from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.network import check_interface, check_launcher
from odb_factory.tools.doctor.process import ProbeError
from odb_factory.tools.doctor.ranks import check_gloo, check_loader
from odb_factory.tools.doctor.resources import (
    check_files,
    check_memory,
    check_processes,
    check_shared_memory,
    check_storage,
)
from odb_factory.tools.doctor.result import Check, fail

CHECKS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "python": check_python,
    "versions": check_versions,
    "variables": check_variables,
    "hook": check_hook,
    "commands": check_commands,
    "shared_memory": check_shared_memory,
    "files": check_files,
    "memory": check_memory,
    "processes": check_processes,
    "storage": check_storage,
    "launcher": check_launcher,
    "interface": check_interface,
    "gloo": check_gloo,
    "loader": check_loader,
    "seams": check_seams,
    "gpu": check_gpu,
    "deepspeed": check_deepspeed,
}

PROBES = {"gloo": "ranks", "loader": "ranks", "seams": "seams", "gpu": "accelerator", "deepspeed": "deepspeed"}
"""The probe that a check uses; probes are started in advance."""


def run_checks(machine: Machine, names: Collection[str] = ()) -> Iterator[Check]:
    """Run the checks with these names (none: all) and yield their lines; a check that raises is a failure."""
    chosen = [name for name in CHECKS if not names or name in names]
    machine.start([PROBES[name] for name in chosen if name in PROBES])
    for name in chosen:
        try:
            yield from CHECKS[name](machine)
        except Exception as error:  # anything may be broken here; the other checks may say more
            yield _failed(name, error)


def _failed(name: str, error: Exception) -> Check:
    kind = "" if isinstance(error, ProbeError) else f"{type(error).__name__}: "
    text = (str(error).splitlines() or ["no message"])[0]
    return fail(
        name,
        f"could not be checked: {kind}{text}",
        f"Fix what it says, then `odb-factory doctor --only {name}`; if packages are broken, reinstall odb-factory.",
    )
