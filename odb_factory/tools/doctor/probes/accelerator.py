"""Loads torch and computes on each visible GPU."""

from __future__ import annotations

from typing import Any

from odb_factory.tools.doctor.process import answer


def look() -> dict[str, Any]:
    """`built`: the CUDA version that torch was built for (None: CPU only); `hip`: the same for ROCm; `error`: why no
    GPU can be used (None where there is none, or all is well); `nccl`: its version; `gpus`: one entry each."""
    import torch

    seen: dict[str, Any] = {
        "torch": torch.__version__,
        "built": torch.version.cuda,
        "hip": torch.version.hip,
        "error": None,
        "nccl": None,
        "gpus": [],
    }
    if not torch.cuda.is_available():
        if torch.version.cuda is not None:
            seen["error"] = _init_error()
        return seen
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    seen["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
    return seen


def _init_error() -> str | None:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _gpu(index: int) -> dict[str, Any]:
    import torch

    seen: dict[str, Any] = {"name": f"GPU {index}", "error": None}
    try:
        properties = torch.cuda.get_device_properties(index)
        seen |= {"name": properties.name, "capability": [properties.major, properties.minor]}
        free, total = torch.cuda.mem_get_info(index)
        seen |= {"free": free, "total": total}
        half = torch.ones(16, 16, dtype=torch.bfloat16, device=f"cuda:{index}")
        if (half @ half).float().sum().item() != 16**3:
            seen["error"] = "a small matrix product in bf16 gave a wrong result"
    except RuntimeError as error:
        seen["error"] = (str(error).splitlines() or [type(error).__name__])[0]
    return seen


if __name__ == "__main__":
    answer(look())
