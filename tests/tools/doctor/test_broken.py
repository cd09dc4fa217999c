"""Machines where training would break, really made so: the command is red, and says what to do."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.doctor.helpers import (
    clean,
    doctor,
    executable,
    looked,
    make_environment,
    only_failure,
    pretend_version,
)

pytestmark = pytest.mark.distributed


def test_switched_off() -> None:
    report = doctor("hook", environ={"ODB_FACTORY_DISABLE": "1"})
    assert report.code == 1
    [bad] = report.of("hook", "FAIL")
    assert bad["found"].startswith("ODB_FACTORY_DISABLE=1 switches odb-factory off")
    assert bad["remedy"] == "unset ODB_FACTORY_DISABLE"


@pytest.mark.slow
def test_hook_file_missing(tmp_path: Path) -> None:
    """All packages are found, but through a path file: `site` reads no hooks there, and `odb:` is really unknown."""
    python = make_environment(tmp_path / "venv", packages=True)
    report = doctor("hook", "seams", "commands", python=str(python))
    assert report.code == 1
    [bad] = report.of("hook", "FAIL")
    assert "odb_factory_hook.pth is missing in" in bad["found"]
    assert str(tmp_path / "venv") in bad["found"]
    assert "-m pip install --force-reinstall --no-deps odb-factory" in bad["remedy"]
    [unknown] = report.of("seams", "FAIL")
    assert unknown["found"] == "`odb:` is not a recipe field"
    assert "`hook`" in unknown["remedy"]
    assert len(report.of("seams", "OK")) == 4, "LLaMA-Factory itself is as it should be"
    commands = report.of("commands", "WARN")
    assert {check["found"].split()[0].rpartition("/")[2] for check in commands} == {"llamafactory-cli", "torchrun"}
    assert all("belongs to another environment" in check["found"] for check in commands)


def test_python_without_site_packages(tmp_path: Path) -> None:
    bare = executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bad = only_failure(looked("hook", python=str(bare)))
    assert "starts without its site-packages (as with -S)" in bad.found
    assert bad.remedy == "Start Python and llamafactory-cli without -S."


def test_commands_of_another_environment(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "other", packages=False)
    script = executable(tmp_path / "other" / "bin" / "llamafactory-cli", f"#!{python}\n")
    environ = clean(PYTHONPATH="")
    environ["PATH"] = f"{script.parent}:{environ['PATH']}"
    bad = only_failure(looked("commands", environ=environ))
    assert bad.found == (
        f"{script} belongs to another environment ({tmp_path / 'other'}), which does not have odb-factory"
    )
    assert bad.remedy == f"Put {Path(sys.executable).parent} first on PATH, or {python} -m pip install odb-factory."


def test_too_few_files() -> None:
    """Below what even two idle ranks need: the exchange fails for it, too."""
    report = doctor("files", "gloo", before=["sh", "-c", 'ulimit -Sn 24; exec "$@"', "sh"])
    assert report.code == 1
    [bad] = report.of("files", "FAIL")
    assert bad["found"] == "24 open files in a process, a run needs 64 at least"
    assert "ulimit -n 1024" in bad["remedy"]
    [gloo] = report.of("gloo", "FAIL")
    assert "too many open files" in gloo["found"].lower()
    assert "files" in gloo["remedy"]


def test_few_files_are_a_warning_and_work() -> None:
    report = doctor("files", "loader", before=["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"])
    assert report.code == 0
    [bad] = report.of("files", "WARN")
    assert bad["found"].startswith("64 open files in a process")
    assert len(report.of("loader", "OK")) == 1


def test_no_such_interface() -> None:
    report = doctor("interface", "gloo", "loader", environ={"GLOO_SOCKET_IFNAME": "nonexistent0"})
    assert report.code == 1
    [bad] = report.of("interface", "FAIL")
    assert bad["found"] == "GLOO_SOCKET_IFNAME=nonexistent0, but there is no network interface nonexistent0"
    assert "Set GLOO_SOCKET_IFNAME to one of lo" in bad["remedy"]
    [gloo] = report.of("gloo", "FAIL")
    assert "nonexistent0" in gloo["found"]
    assert "GLOO_SOCKET_IFNAME" in gloo["remedy"]
    [loader] = report.of("loader", "FAIL")
    assert loader["remedy"] == "See the check gloo."


def test_no_network_at_all() -> None:
    alone = ["unshare", "-rn"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespace")
    report = doctor("gloo", before=alone)
    assert report.code == 1
    [bad] = report.of("gloo", "FAIL")
    assert bad["found"].startswith("two local processes cannot exchange: this machine cannot open a Gloo connection")
    assert "GLOO_SOCKET_IFNAME" in bad["remedy"]


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        report = doctor("gloo", arguments=["--odb-port", str(port)])
    [bad] = report.of("gloo", "FAIL")
    assert report.code == 1
    assert f"rank 0 cannot open port {port} (odb_port)" in bad["found"]
    assert "it is in use" in bad["found"]
    assert bad["remedy"].startswith("Set odb_port to a free port")


def test_versions_outside_their_ranges(tmp_path: Path) -> None:
    for package, version in (("torch", "2.9.1"), ("transformers", "4.57.1"), ("deepspeed", "0.99.0")):
        pretend_version(tmp_path, package, version)
    report = doctor("versions", environ={"PYTHONPATH": str(tmp_path)})
    assert report.code == 1
    torch, transformers = report.of("versions", "FAIL")
    assert torch["found"].startswith("torch 2.9.1 is outside the tested range ")
    assert "Qwen3-VL" in torch["found"]
    assert torch["remedy"].startswith('pip install "torch')
    assert "!=2.9.*" in torch["remedy"]
    assert transformers["found"].startswith("transformers 4.57.1 is outside")
    [deepspeed] = report.of("versions", "WARN")
    assert deepspeed["found"].startswith("deepspeed 0.99.0 is outside")
    assert "only recipes with `deepspeed:` need it" in deepspeed["remedy"]


RENAME = """
import importlib.machinery, sys

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        module._get_preprocessed_data = module.__dict__.pop("_get_preprocessed_dataset")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "llamafactory.data.loader" else None
        if spec is not None:
            spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.slow
def test_a_seam_was_renamed(tmp_path: Path) -> None:
    """The installed LLaMA-Factory, but for one function that has another name, as after an edit of its source."""
    (tmp_path / "sitecustomize.py").write_text(RENAME, encoding="utf-8")
    report = doctor("seams", environ={"PYTHONPATH": str(tmp_path)})
    assert report.code == 1
    [bad] = report.of("seams", "FAIL")
    assert "the seam llamafactory.data.loader._get_preprocessed_dataset is missing" in bad["found"]
    assert bad["remedy"] == 'pip install --force-reinstall --no-deps "llamafactory==0.9.5"'
    assert len(report.of("seams", "OK")) == 4


def test_another_release_of_llamafactory(tmp_path: Path) -> None:
    """One whose modules lie elsewhere and cannot be imported; the other checks go on."""
    pretend_version(tmp_path, "llamafactory", "0.10.0")
    (tmp_path / "llamafactory").mkdir()
    (tmp_path / "llamafactory" / "__init__.py").write_text("", encoding="utf-8")
    report = doctor("versions", "seams", "files", environ={"PYTHONPATH": str(tmp_path)})
    assert report.code == 1
    [version] = report.of("versions", "FAIL")
    assert version["found"].startswith("llamafactory 0.10.0 is outside the tested range")
    first, *seams, field = report.of("seams", "FAIL")
    assert "tested with LLaMA-Factory 0.9.5, this is 0.10.0" in first["found"]
    assert len(seams) == 4
    assert all("ModuleNotFoundError: No module named 'llamafactory." in seam["found"] for seam in seams)
    assert field["found"].startswith("`odb:` is not a recipe field")
    assert len(report.of("files", "OK") + report.of("files", "WARN")) == 1


@pytest.fixture
def namespace() -> list[str]:
    """Starts a command where `/dev/shm` has 32 MB."""
    small = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o size=32m none /dev/shm && eval "$FILL" && exec "$@"',
        "sh",
    ]
    if subprocess.run([*small, "true"], env={"FILL": ":"}, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount namespace")
    return small


def test_small_shared_memory_is_a_warning_and_works(namespace: list[str]) -> None:
    report = doctor("shared_memory", "loader", environ={"FILL": ":"}, before=namespace)
    assert report.code == 0
    [bad] = report.of("shared_memory", "WARN")
    assert re.match(r"3[12] MiB free in /dev/shm", bad["found"])  # the kernel counts what was freed a little later
    assert "--shm-size=1g" in bad["remedy"]
    assert len(report.of("loader", "OK")) == 1


def test_full_shared_memory(namespace: list[str]) -> None:
    fill = "(head -c 64M /dev/zero > /dev/shm/full 2>/dev/null || true)"
    report = doctor("shared_memory", "loader", environ={"FILL": fill}, before=namespace)
    assert report.code == 1
    [bad] = report.of("shared_memory", "FAIL")
    assert bad["found"] == "/dev/shm has no room for 1 MiB: No space left on device"
    assert "--shm-size=1g" in bad["remedy"]
    [loader] = report.of("loader", "FAIL")
    assert "No space left on device" in loader["found"]
    assert "shared_memory" in loader["remedy"]
