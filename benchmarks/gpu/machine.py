"""The device with the model on it, made once for all cells."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.attention import find_kernel, register
from benchmarks.gpu.shape import Work, make_model, peak_flops, work_of
from benchmarks.gpu.trainee import Trainee


@dataclass(frozen=True, slots=True)
class Machine:
    """What trains, and what is known of it."""

    trainee: Trainee
    work: Work
    peak_flops: float | None
    can_pack: bool
    settings: dict[str, str | int]
    """For the rows."""


def set_up(device_name: str, tiny: bool, seed: int) -> Machine:
    """The model on the device.

    Raises:
        BenchmarkError: there is no such device, no transformers with this model, or the model does not fit.
    """
    device = _device(device_name)
    peak = None
    if device.type == "cuda":
        _settle_cuda()
        peak = peak_flops(torch.cuda.get_device_name(device))
    else:
        torch.set_num_threads(1)  # a tiny model's operations are too small to share
    kernel, reasons = find_kernel(device)
    for reason in reasons:
        print(f"attention kernel not used: {reason}", flush=True)
    try:
        register(kernel)
        model = make_model(tiny, device, torch.bfloat16 if device.type == "cuda" else torch.float32, seed)
    except ImportError as error:
        raise BenchmarkError(f"transformers with Qwen3-VL is needed ({error}); pip install transformers.") from None
    trainee = Trainee(model, device)
    if device.type == "cuda":
        print(f"patch embedding of 32,768 patches: {patch_embedding_ms(model, device):.3g} ms", flush=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{'tiny model' if tiny else 'model'} of {parameters / 1e9:.3f} billion parameters on {device}, {model.dtype}, "
        f"attention without padding: {kernel.name}",
        flush=True,
    )
    return Machine(
        trainee=trainee,
        work=work_of(model),
        peak_flops=peak,
        # on a CPU no kernel is fast, and the same code is what is tested there
        can_pack=kernel.fast or device.type == "cpu",
        settings={"kernel": kernel.name, "dtype": str(model.dtype).removeprefix("torch."), "parameters": parameters},
    )


@torch.no_grad()
def patch_embedding_ms(model: Any, device: torch.device, patches: int = 32_768) -> float:
    """Time of the vision tower's first layer, a Conv3d, which some releases of PyTorch run far too slowly.

    As a matrix product it would be well under a millisecond on an H200; where it takes some hundred, the tables with
    images say little about batching.
    """
    layer = model.model.visual.patch_embed
    values = layer.proj.weight[0].numel()
    inputs = torch.randn(patches, values, device=device, dtype=model.dtype)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    layer(inputs)
    begin.record()
    layer(inputs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def wants_tiny(device_name: str) -> bool:
    """Whether the device is a CPU, on which the full model would take hours."""
    return _device(device_name).type == "cpu"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("PyTorch finds no CUDA device here; use --device cpu, which takes a tiny model.")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _settle_cuda() -> None:
    """What suits batches of ever new shapes; the same for every method."""
    # cuDNN's attention builds a plan for each new shape; PyTorch's flash attention does not
    torch.backends.cuda.enable_cudnn_sdp(False)
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return
    setting = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if setting is None:
        return
    for choice in ("True", "False"):  # segments that grow: freed blocks of one shape serve the next one
        try:
            setting(f"expandable_segments:{choice}")
            torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda").fill_(1)
            torch.cuda.synchronize()
            return
        except Exception as error:  # not every driver or virtual machine can
            print(f"expandable_segments:{choice} does not work here: {str(error).splitlines()[:1]}", flush=True)
