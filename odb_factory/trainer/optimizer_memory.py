"""What an optimizer will hold once it has taken its first step, without having it take one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

SIDE = 128
"""Rows and columns of the stand-in of a parameter; optimizers with 8-bit states treat small tensors in another way."""

FALLBACK = 8.0
"""Bytes a parameter for optimizers that cannot be tried: two states in float32, as Adam has."""


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer within the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def pending_state_bytes(optimizer: Any, device: torch.device) -> int:
    """Bytes on `device` that the first step will allocate for states that stay, on this rank.

    How many bytes an element needs is measured: an optimizer of the same class and options takes a step on a small
    tensor of the same type. The optimizer itself is not touched.
    """
    optimizer = bare_optimizer(optimizer)
    known: dict[tuple[int, torch.dtype], float] = {}
    total = 0.0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if not parameter.requires_grad or local.device.type != device.type or optimizer.state.get(parameter):
                continue
            key = (number, local.dtype)
            if key not in known:
                known[key] = _bytes_an_element(optimizer, group, local.dtype, device)
            total += known[key] * local.numel()
    return int(total)


def _bytes_an_element(optimizer: Any, group: dict[str, Any], dtype: torch.dtype, device: torch.device) -> float:
    try:
        with torch.enable_grad():
            tensor = torch.nn.Parameter(torch.zeros(SIDE, SIDE, dtype=dtype, device=device))
        tensor.grad = torch.zeros_like(tensor)
        accepted = inspect.signature(type(optimizer).__init__).parameters
        defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        options = {key: value for key, value in group.items() if key != "params"}
        stand_in = type(optimizer)([{**options, "params": [tensor]}], **defaults)
        stand_in.step()
        return sum(t.numel() * t.element_size() for t in _tensors(stand_in.state.get(tensor))) / tensor.numel()
    except Exception:  # whatever an optimizer that is not torch's may ask for
        return FALLBACK


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that the optimizer has of its own (ZeRO's parts in float32), and the states that are there."""
    optimizer = bare_optimizer(optimizer)
    yield from _tensors([group["params"] for group in optimizer.param_groups])
    yield from _tensors(list(optimizer.state.values()))
