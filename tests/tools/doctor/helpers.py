"""Runs `odb-factory doctor`, and makes what it is to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.registry import run_checks
from odb_factory.tools.doctor.result import Check, Status

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(sys.executable).parent
SITE_PACKAGES = sysconfig.get_paths()["purelib"]

DEADLINE = 110.0
"""Seconds for a command."""

UNSET = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"),
    *("USE_V1", "USE_MCA", "USE_RAY", "ALLOW_EXTRA_ARGS", "DISABLE_VERSION_CHECK", "CUDA_LAUNCH_BLOCKING"),
    *("ODB_FACTORY_DISABLE", "GLOO_SOCKET_IFNAME", "NVIDIA_VISIBLE_DEVICES", "TMPDIR"),
)
"""Variables that the machine where the tests run may have, and that a test sets itself."""


def clean(**environ: str) -> dict[str, str]:
    """The environment of a healthy machine, and `environ`."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**kept, "PATH": f"{SCRIPTS}:{kept['PATH']}", "CUDA_VISIBLE_DEVICES": "", **environ}


@dataclass(frozen=True)
class Report:
    """What the command said."""

    code: int
    checks: list[dict[str, str]]

    def of(self, name: str, status: str) -> list[dict[str, str]]:
        """The lines of a check with a status; a remedy is there exactly where it should be."""
        assert all(bool(check["remedy"]) == (check["status"] != "OK") for check in self.checks)
        return [check for check in self.checks if check["name"] == name and check["status"] == status]


def doctor(
    *names: str,
    environ: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    python: str = sys.executable,
    before: Sequence[str] = (),
) -> Report:
    """The command in a process of its own, with only the checks of these names; `before`: what starts it."""
    only = [part for name in names for part in ("--only", name)]
    command = [*before, python, "-m", "odb_factory.cli", "doctor", "--json", *only, *arguments]
    done = subprocess.run(
        command, env=clean(**(environ or {})), cwd="/", capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return Report(done.returncode, report["checks"])


def looked(name: str, **machine: Any) -> list[Check]:
    """The lines of one check, in this process, on a machine with these differences from a healthy one."""
    machine.setdefault("environ", clean())
    with Machine(**machine) as made:
        return list(run_checks(made, [name]))


def only_failure(checks: Sequence[Check], status: Status = Status.FAIL) -> Check:
    """The one line that is not OK, of that status."""
    [bad] = [check for check in checks if check.status is not Status.OK]
    assert bad.status is status
    return bad


def make_environment(folder: Path, *, packages: bool) -> Path:
    """A virtual environment; `packages`: it finds this one's packages through a path file, whose hooks no one reads.

    Returns:
        its Python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    if packages:
        lines = f"{ROOT}\n{SITE_PACKAGES}\n"
        (site_packages(folder) / "elsewhere.pth").write_text(lines, encoding="utf-8")
    return python


def site_packages(folder: Path) -> Path:
    """The folder for the packages of a virtual environment."""
    [found] = folder.glob("lib/python*/site-packages")
    return found


def executable(path: Path, text: str) -> Path:
    """A program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def pretend_version(folder: Path, package: str, version: str) -> None:
    """Metadata of a package as pip leaves it; where `folder` is first on the path, it is the version that is seen."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8")
