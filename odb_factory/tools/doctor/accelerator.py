"""Checks of GPUs and DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from odb_factory.tools.doctor.machine import Machine, ProbeError
from odb_factory.tools.doctor.result import Check, fail, ok, warn

LEAST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with native bf16 (Ampere)."""

BUSY = 0.5
"""If a smaller share of a GPU's memory is free, something else seems to use it."""


def check_gpu(machine: Machine) -> Iterator[Check]:
    """Each GPU; if there is none, whether a driver suggests that there should be."""
    seen = machine.probe("accelerator")
    if not seen["gpus"]:
        yield _without(machine, seen)
        return
    build = f"CUDA {seen['built']}" if seen["built"] else f"ROCm {seen['hip']}"
    for index, gpu in enumerate(seen["gpus"]):
        yield _judge(index, gpu, build)
    yield from _too_many_ranks(machine, len(seen["gpus"]))
    if seen["nccl"]:
        yield ok("gpu", f"NCCL {seen['nccl']}")
    else:
        bad = fail if len(seen["gpus"]) > 1 else warn
        yield bad("gpu", "this torch has no NCCL, so that several GPUs cannot train together", _reinstall(machine))


def _too_many_ranks(machine: Machine, gpus: int) -> Iterator[Check]:
    """A failure if NPROC_PER_NODE is a number above that of the GPUs: each rank needs its own."""
    ranks = machine.environ.get("NPROC_PER_NODE", "")
    if ranks.isdecimal() and int(ranks) > gpus:
        yield fail(
            "gpu",
            f"NPROC_PER_NODE={ranks}, but a rank needs a GPU of its own, and {gpus} can be used here",
            f"Set NPROC_PER_NODE to at most {gpus}, or unset it (one rank for each GPU).",
        )


def _reinstall(machine: Machine) -> str:
    return f"{machine.python} -m pip install --force-reinstall torch torchvision, built for the driver's CUDA version."


def _without(machine: Machine, seen: Mapping[str, Any]) -> Check:
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return ok("gpu", f"CPU only: CUDA_VISIBLE_DEVICES={hidden} hides GPUs, if there are any")
    driver = _driver(machine)
    if driver is None:
        promised = machine.environ.get("NVIDIA_VISIBLE_DEVICES", "")
        if promised in ("", "void", "none"):
            return ok("gpu", "CPU only: no GPU, no driver")
        return warn(
            "gpu",
            f"NVIDIA_VISIBLE_DEVICES={promised} announces GPUs to this container, but there is no driver in it",
            "Start the container with GPUs (docker run --gpus all), or ignore this where there are none.",
        )
    if seen["built"] is None:
        return fail(
            "gpu",
            f"{driver} shows an NVIDIA driver, but torch {seen['torch']} is built without CUDA: training would run on "
            "the CPU",
            _reinstall(machine),
        )
    return fail(
        "gpu",
        f"{driver} shows an NVIDIA driver, but torch {seen['torch']} (CUDA {seen['built']}) can use no GPU: "
        f"{seen['error'] or 'it finds none'}",
        "Run nvidia-smi; update the driver, or install a torch for its CUDA version; in a container, pass the GPUs.",
    )


def _driver(machine: Machine) -> str | None:
    """A path that shows that an NVIDIA driver is installed; None if there is no sign of one."""
    if (machine.devices / "nvidiactl").exists() or (machine.devices / "nvidia0").exists():
        return str(machine.devices / "nvidiactl")
    return shutil.which("nvidia-smi", path=machine.environ.get("PATH", ""))


def _judge(index: int, gpu: Mapping[str, Any], build: str) -> Check:
    what = f"{index}: {gpu['name']}"
    if gpu["error"]:
        return fail(
            "gpu",
            f"{what} does not compute with {build}: {gpu['error']}",
            "Free it if its memory is full (nvidia-smi); else install a torch that is built for it and its driver.",
        )
    free, total, capability = gpu["free"], gpu["total"], tuple(gpu["capability"])
    found = f"{what}, {total / 2**30:.0f} GiB, compute capability {capability[0]}.{capability[1]}, {build}"
    if build.startswith("CUDA") and capability < LEAST_CAPABILITY:
        return warn("gpu", f"{found}: no native bf16, which is slow", "Set `fp16: true` in the recipe, not bf16.")
    if free < BUSY * total:
        return warn(
            "gpu",
            f"{found}, of which only {free / 2**30:.1f} GiB are free",
            "End what else runs on it (nvidia-smi), or leave it out with CUDA_VISIBLE_DEVICES.",
        )
    return ok("gpu", f"{found}, computes in bf16")


def check_deepspeed(machine: Machine) -> Iterator[Check]:
    """DeepSpeed can be imported (only recipes with `deepspeed:` need it)."""
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        yield warn("deepspeed", "is not installed", "pip install deepspeed, if a recipe has `deepspeed:` (ZeRO).")
        return
    try:
        seen = machine.probe("deepspeed")
    except ProbeError as error:
        yield warn(
            "deepspeed",
            f"cannot be imported ({error})",
            "Recipes with `deepspeed:` (ZeRO) need it: reinstall it, and where it misses CUDA, set CUDA_HOME.",
        )
        return
    yield ok("deepspeed", f"{seen['version']} can be imported")
