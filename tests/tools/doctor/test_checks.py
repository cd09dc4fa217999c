"""Single checks, on machines that differ from a healthy one in one thing."""

from __future__ import annotations

import os
import resource
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.doctor import environment, network, resources
from odb_factory.tools.doctor.accelerator import _judge as judge_gpu
from odb_factory.tools.doctor.accelerator import _too_many_ranks, _without
from odb_factory.tools.doctor.hook import HOOK_FILE, interpreter
from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.network import addresses, is_own_address
from odb_factory.tools.doctor.resources import LONGEST_TEMPORARY
from odb_factory.tools.doctor.result import Status
from tests.llamafactory.cli import free_port
from tests.tools.doctor.helpers import ROOT, clean, executable, looked, make_environment, only_failure, site_packages

# -- the hook and the commands


def test_a_hook_file_that_does_nothing(tmp_path: Path) -> None:
    python = make_environment(tmp_path, packages=True)
    (site_packages(tmp_path) / HOOK_FILE).write_text("# emptied\n", encoding="utf-8")
    bad = only_failure(looked("hook", python=str(python)))
    assert bad.found == f"{site_packages(tmp_path) / HOOK_FILE} is there, but a fresh Python did not run it"


def test_an_environment_without_the_package(tmp_path: Path) -> None:
    python = make_environment(tmp_path, packages=False)
    bad = only_failure(looked("hook", python=str(python), environ=clean(PYTHONPATH="")))
    assert bad.found.startswith(f"a fresh {python} does not find odb_factory in {tmp_path}")


def test_the_hook_in_another_environment_is_seen(tmp_path: Path) -> None:
    """The control of the two above, and of test_broken.py: the same environment with a good hook file."""
    from odb_factory.llamafactory import autoload

    python = make_environment(tmp_path, packages=True)
    good = Path(autoload.__file__).with_name(HOOK_FILE).read_text(encoding="utf-8")
    (site_packages(tmp_path) / HOOK_FILE).write_text(good, encoding="utf-8")
    [check] = looked("hook", python=str(python))
    assert check.status is Status.OK


def test_no_command_anywhere(tmp_path: Path) -> None:
    python = make_environment(tmp_path, packages=True)
    checks = looked("commands", python=str(python), environ=clean() | {"PATH": str(tmp_path)})
    assert [check.status for check in checks] == [Status.FAIL, Status.FAIL]
    assert checks[0].found == f"there is no llamafactory-cli on PATH or in {python.parent}"


def test_commands_beside_python_but_not_on_path(tmp_path: Path) -> None:
    checks = looked("commands", environ=clean() | {"PATH": str(tmp_path)})
    assert [check.status for check in checks] == [Status.WARN, Status.WARN]
    assert checks[0].remedy == f"export PATH={Path(sys.executable).parent}:$PATH (activate)."


def test_commands_that_pip_put_into_the_user_folder(tmp_path: Path) -> None:
    """As by `pip install --user` where ~/.local/bin is not on PATH; PYTHONUSERBASE is what `~/.local` is else."""
    command = executable(tmp_path / "user" / "bin" / "llamafactory-cli", "#!/usr/bin/python3\n")
    environ = clean(PYTHONUSERBASE=str(tmp_path / "user"), PYTHONNOUSERSITE="") | {"PATH": str(tmp_path)}
    python = executable(tmp_path / "python", f'#!/bin/sh\nexec {sys._base_executable} "$@"\n')  # type: ignore[attr-defined]
    cli, _ = looked("commands", python=str(python), environ=environ)
    assert cli.status is Status.WARN
    assert cli.found == f"llamafactory-cli is not on PATH, but lies in {command.parent}"
    assert cli.remedy == f"export PATH={command.parent}:$PATH."


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/opt/env/bin/python\nimport re\n", "/opt/env/bin/python"),
        ("#!/opt/env/bin/python3.11\n", "/opt/env/bin/python3.11"),
        ("#!/bin/sh\n'''exec' \"/a b/env/bin/python\" \"$0\" \"$@\"\n' '''\n", "/a b/env/bin/python"),
        ("#!/bin/sh\n'''exec' /long/env/bin/python3 \"$0\" \"$@\"\n' '''\n", "/long/env/bin/python3"),
        ("#!/bin/sh\nexec llamafactory\n", None),
        ("\x7fELF", None),
    ],
)
def test_the_python_of_a_script(tmp_path: Path, head: str, python: str | None) -> None:
    assert interpreter(executable(tmp_path / "script", head)) == python


# -- variables, launcher, network


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("USE_V1", "1", Status.WARN),
        ("USE_V1", "on", Status.WARN),
        ("USE_MCA", "true", Status.FAIL),
        ("ALLOW_EXTRA_ARGS", "1", Status.WARN),
        ("USE_RAY", "1", Status.WARN),
    ],
)
def test_variables_that_lead_elsewhere(name: str, value: str, status: Status) -> None:
    bad = only_failure(looked("variables", environ=clean(**{name: value})), status)
    assert bad.found.startswith(f"{name}={value} ")
    assert bad.remedy == f"unset {name}"


def test_variables_switched_off_are_fine() -> None:
    [check] = looked("variables", environ=clean(USE_V1="0", HF_HUB_OFFLINE="1"))
    assert check.status is Status.OK
    assert "HF_HUB_OFFLINE=1" in check.found


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 announces several ranks, but there is no RANK"),
        ({"RANK": "0"}, "RANK=0 is set, but not WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first is not a number of at least 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is above 65535"),
        (
            {"NPROC_PER_NODE": "abc"},
            "NPROC_PER_NODE=abc is neither a number of at least 1 nor one of auto, gpu, cpu, xpu",
        ),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0 is neither a number of at least 1 nor one of auto, gpu, cpu, xpu"),
        ({"MASTER_ADDR": "node-0.invalid"}, "MASTER_ADDR=node-0.invalid does not resolve"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            "NODE_RANK=2 is not below NNODES=2",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "NODE_RANK": "1"},
            "NNODES=2, but MASTER_ADDR=localhost is this machine alone",
        ),
        (
            {"NNODES": "2", "MASTER_PORT": "29500", "NODE_RANK": "1"},
            "NNODES=2, but MASTER_ADDR is not set (taken as 127.0.0.1)",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "10.0.0.1"},
            "NNODES=2, but MASTER_PORT is not set: each node would choose its own",
        ),
    ],
)
def test_launcher_variables_that_do_not_fit(environ: dict[str, str], found: str) -> None:
    bad = only_failure(looked("launcher", environ=clean(**environ)))
    assert bad.found == found
    assert bad.remedy


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
        {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"NNODES": "1", "MASTER_ADDR": "localhost"},
        {"NPROC_PER_NODE": "2"},
        {"NPROC_PER_NODE": "auto"},
    ],
)
def test_launcher_variables_that_fit(environ: dict[str, str]) -> None:
    [check] = looked("launcher", environ=clean(**environ))
    assert check.status is Status.OK
    assert all(f"{name}={value}" in check.found for name, value in environ.items())


def test_master_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        bad = only_failure(looked("launcher", environ=clean(MASTER_PORT=port)))
        assert bad.found == f"MASTER_PORT={port} cannot be opened here: Address already in use"
        rank = clean(MASTER_PORT=port, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        assert looked("launcher", environ=rank)[0].status is Status.OK, "within a run, the run has it"
    [check] = looked("launcher", environ=clean(MASTER_PORT=str(free_port())))
    assert check.status is Status.OK


def test_a_host_name_for_this_machine_alone_is_no_good_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    several = clean(NNODES="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert "the other nodes could not connect" in only_failure(looked("interface", environ=several)).found
    assert looked("interface")[0].status is Status.OK
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.invalid")
    bad = only_failure(looked("interface"), Status.WARN)
    assert bad.found == "the host name node-7.invalid does not resolve: this works on one node only"
    assert looked("interface", environ=clean(GLOO_SOCKET_IFNAME="lo"))[0].status is Status.OK


@pytest.mark.parametrize("wanted", ["", "lo", "nonexistent0"])
@pytest.mark.parametrize("names", [["lo", "eth0"], ["lo"]])
def test_the_loopback_is_no_remedy_on_several_nodes(
    wanted: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, start=1)))
    several = clean(NNODES="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME=wanted)
    bad = only_failure(looked("interface", environ=several))
    start = "Set GLOO_SOCKET_IFNAME to one of eth0, or" if len(names) == 2 else "Connect this machine to a network, or"
    assert bad.remedy.startswith(start)
    assert "lo," not in bad.remedy
    if wanted == "lo":
        assert bad.found == "GLOO_SOCKET_IFNAME=lo: the other nodes could not connect to this one"


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with addresses of both kinds, where no socket of the one kind can be made."""

    class NoIpv6(socket.socket):
        def __init__(self, family: int = -1, *rest: Any, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family, *rest, **more)

    found = ["::1", "127.0.0.1"]
    monkeypatch.setattr(network, "addresses", lambda host: found)
    monkeypatch.setattr(socket, "socket", NoIpv6)
    assert is_own_address("both")
    found[:] = ["::1", "192.0.2.1"]
    assert not is_own_address("both")
    environ = clean(MASTER_ADDR="both", MASTER_PORT=str(free_port()))
    assert looked("launcher", environ=environ)[0].status is Status.OK


def test_addresses() -> None:
    assert "127.0.0.1" in addresses("localhost")
    assert addresses("node-0.invalid") == []
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")  # reserved for documentation


# -- limits


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_no_shared_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shm"
    if kind == "file":
        path.write_text("")
    bad = only_failure(looked("shared_memory", shared_memory=path))
    assert bad.found.startswith(f"{path} is missing")


def test_several_gpus_want_more_shared_memory(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"nvidia{index}").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "GOOD_SHARED_NCCL", 2**60)
        bad = only_failure(looked("shared_memory", devices=tmp_path), Status.WARN)
    assert "NCCL on 2 GPUs may need" in bad.found


def test_a_small_file_in_the_shared_memory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = os.statvfs("/dev/shm")
    free = state.f_bavail * state.f_frsize
    monkeypatch.setattr(resources, "GOOD_SHARED", int(free * 1.02))
    assert looked("shared_memory", devices=tmp_path)[0].status is Status.OK
    monkeypatch.setattr(resources, "GOOD_SHARED", 2 * free)
    bad = only_failure(looked("shared_memory", devices=tmp_path), Status.WARN)
    assert "evaluation with workers may need" in bad.found


@pytest.mark.parametrize(
    ("free", "status"), [(None, Status.WARN), (2**29, Status.FAIL), (2 * 2**30, Status.WARN), (2**35, Status.OK)]
)
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: Status) -> None:
    monkeypatch.setattr(resources, "available_memory", lambda: free)
    [check] = looked("memory")
    assert check.status is status


@pytest.mark.parametrize(("allowed", "status"), [(130, Status.FAIL), (400, Status.WARN), (2000, Status.OK)])
def test_processes_of_a_control_group(tmp_path: Path, allowed: int, status: Status) -> None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        top = tmp_path / "pids" if controllers else tmp_path
        folder = top / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text("max")  # no limit of its own, but that of the group above
        (top / "pids.max").write_text(f"{allowed}\n")
        (top / "pids.current").write_text("100\n")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    [check] = looked("processes", control_groups=tmp_path)
    if soft == resource.RLIM_INFINITY or soft > 10_000:
        assert check.status is status
        assert check.found.startswith(f"{allowed - 100} more processes")


# -- storage


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = only_failure(looked("storage", environ=clean(HF_HOME=str(tmp_path / "file"), HF_DATASETS_CACHE="")))
    assert bad.found == f"datasets cannot be cached in {tmp_path / 'file' / 'datasets'}: Not a directory"
    assert "HF_HOME" in bad.remedy


def test_cache_folder_is_only_made_by_a_run(tmp_path: Path) -> None:
    checks = looked("storage", environ=clean(HF_DATASETS_CACHE=str(tmp_path / "new" / "cache")))
    assert any(f"datasets are cached in {tmp_path / 'new' / 'cache'}" in check.found for check in checks)
    assert not (tmp_path / "new").exists()


def test_temporary_folder(tmp_path: Path) -> None:
    environ = clean(HF_DATASETS_CACHE=str(tmp_path), TMPDIR=str(tmp_path / "none"))
    assert looked("storage", environ=environ)[0].found.startswith(f"TMPDIR={tmp_path / 'none'} cannot be used")
    long = tmp_path / ("x" * LONGEST_TEMPORARY)
    long.mkdir()
    first = looked("storage", environ=environ | {"TMPDIR": str(long)})[0]
    assert first.status is Status.WARN
    assert "AF_UNIX path too long" in first.found


# -- GPUs: the answers of a probe, which this machine cannot give


def without(devices: Path, built: str | None, **environ: str) -> Any:
    seen = {"torch": "2.14.1", "built": built, "error": "Found no NVIDIA driver"}
    kept = {name: value for name, value in clean().items() if name != "CUDA_VISIBLE_DEVICES"}
    with Machine(devices=devices, environ=kept | {"PATH": str(devices)} | environ) as machine:
        return _without(machine, seen)


def test_a_driver_that_torch_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    cpu = without(tmp_path, None)
    assert cpu.status is Status.FAIL
    assert "is built without CUDA: training would run on the CPU" in cpu.found
    assert "pip install --force-reinstall torch" in cpu.remedy
    old = without(tmp_path, "13.0")
    assert old.status is Status.FAIL
    assert "torch 2.14.1 (CUDA 13.0) can use no GPU: Found no NVIDIA driver" in old.found
    assert "nvidia-smi" in old.remedy


def test_nvidia_smi_shows_a_driver(tmp_path: Path) -> None:
    smi = executable(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    assert without(tmp_path, None).found.startswith(f"{smi} shows an NVIDIA driver")


def test_no_driver(tmp_path: Path) -> None:
    assert without(tmp_path, "13.0").status is Status.OK
    assert without(tmp_path, "13.0", NVIDIA_VISIBLE_DEVICES="void").status is Status.OK
    promised = without(tmp_path, "13.0", NVIDIA_VISIBLE_DEVICES="all")
    assert promised.status is Status.WARN
    assert "--gpus all" in promised.remedy


def test_hidden_gpus(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    hidden = without(tmp_path, None, CUDA_VISIBLE_DEVICES="")
    assert hidden.status is Status.OK
    assert "hides GPUs" in hidden.found


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_driver_without_a_gpu_through_the_real_probe(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    environ = {name: value for name, value in clean().items() if name != "CUDA_VISIBLE_DEVICES"}
    bad = only_failure(looked("gpu", environ=environ, devices=tmp_path))
    assert "shows an NVIDIA driver, but torch 2." in bad.found


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, Status.OK, "0: NVIDIA H200, 140 GiB, compute capability 9.0, CUDA 12.8, computes in bf16"),
        ({"capability": [7, 5]}, Status.WARN, "no native bf16"),
        ({"free": 3 * 2**30}, Status.WARN, "of which only 3.0 GiB are free"),
        (
            {"error": "CUDA error: no kernel image"},
            Status.FAIL,
            "does not compute with CUDA 12.8: CUDA error: no kernel",
        ),
    ],
)
def test_a_gpu(changed: dict[str, Any], status: Status, said: str) -> None:
    gpu = {"name": "NVIDIA H200", "capability": [9, 0], "free": 139 * 2**30, "total": 140 * 2**30, "error": None}
    check = judge_gpu(0, gpu | changed, "CUDA 12.8")
    assert check.status is status
    assert said in check.found


@pytest.mark.parametrize(("ranks", "bad"), [("2", False), ("3", True), ("auto", False), ("", False)])
def test_more_ranks_than_gpus(ranks: str, bad: bool) -> None:
    with Machine(environ=clean(NPROC_PER_NODE=ranks)) as machine:
        found = list(_too_many_ranks(machine, 2))
    assert [check.status for check in found] == [Status.FAIL] * bad
    assert all(
        "NPROC_PER_NODE=3, but a rank needs a GPU of its own, and 2 can be used here" in check.found for check in found
    )


# -- versions


@pytest.mark.parametrize(("version", "wrong"), [("0.17.6", True), ("0.18.9", True), ("0.20.1", False)])
def test_an_older_deepspeed(version: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from packaging.requirements import Requirement

    lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    [wanted] = [str(r.specifier) for r in map(Requirement, lines) if r.name == "deepspeed"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    check = environment._judge("deepspeed", wanted)
    assert check.status is Status.WARN
    assert check.found.startswith(f"deepspeed {version} is outside the tested range {wanted}")
    assert ("ZeRO-2 and ZeRO-3 accumulate gradients wrongly" in check.found) == wrong
    assert check.remedy.startswith(f'pip install "deepspeed{wanted}" (only recipes with `deepspeed:` need it')


def test_ranges_come_from_the_metadata() -> None:
    import importlib.metadata

    ranges = environment.tested_ranges()
    ours = {r.split(";")[0] for r in importlib.metadata.requires("odb-factory") or [] if "extra ==" not in r}
    assert {f"{name}{wanted}" for name, wanted in ranges.items() if name not in ("accelerate", "tokenizers")} == ours
    assert ranges["accelerate"]
    assert ranges["tokenizers"]
