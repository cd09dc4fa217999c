"""Steps on trial: forward and backward as in training, and afterwards everything is as it was before."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

LARGEST_BUFFER = 1 << 24
"""Elements of a buffer above which it is not kept to be restored: such are quantized weights, which no step changes."""

_PLAIN = (bool, int, float, str, type(None))
_UNSET = object()


@contextmanager
def no_trace(model: Any, device: torch.device) -> Iterator[None]:
    """What runs within leaves no gradient, random number, buffer, mode or counter behind in the model or its engine.

    Covered are random states (Python, NumPy, torch on the CPU and on `device`), buffers, also those that a module
    replaces, plain attributes of modules (training mode, lengths that rotary embeddings remember, DDP's notes of what
    is to be synchronised), gradients, and what DeepSpeed keeps of gradients between backward and step.
    """
    states = _random_states(device)
    modules = [(module, _plain(module), _buffers(module)) for module in _without_engine(model).modules()]
    engine = _engine_state(model)
    try:
        yield
    finally:
        for module, plain, buffers in modules:
            _restore_plain(module, plain)
            _restore_buffers(module, buffers)
        forget_gradients(model)
        _restore_engine(model, engine)
        _restore_random(states, device)
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def is_deepspeed(model: Any) -> bool:
    """The model is a DeepSpeed engine."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def _without_engine(model: Any) -> Any:
    """DeepSpeed's engine has counters of its own, which mean more than the attributes of a module."""
    return model.module if is_deepspeed(model) else model


def forget_gradients(model: Any) -> None:
    """Drop all gradients, also what DeepSpeed has made of them: as its step does when it finds an overflow."""
    for parameter in model.parameters():
        parameter.grad = None
    optimizer = model.optimizer if is_deepspeed(model) else None
    if optimizer is None or not hasattr(optimizer, "micro_step_id"):  # no optimizer of ZeRO
        return
    step = optimizer.micro_step_id
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "_release_preflattened_grad_buffers"):
        optimizer._release_preflattened_grad_buffers()
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        optimizer.reset_cpu_buffers()
    for name in ("averaged_gradients", "all_grad_tensors"):
        kept = getattr(optimizer, name, {})
        for key in kept:
            kept[key] = None
    if hasattr(optimizer, "clear_backward_seen_flag"):
        optimizer.clear_backward_seen_flag()
    optimizer.micro_step_id = step


def _engine_state(model: Any) -> dict[str, Any]:
    if not is_deepspeed(model):
        return {}
    return {
        "boundary": model._is_gradient_accumulation_boundary,
        "micro_step_id": getattr(model.optimizer, "micro_step_id", None),
        "averaged_gradients": dict(getattr(model.optimizer, "averaged_gradients", {})),
    }


def _restore_engine(model: Any, state: dict[str, Any]) -> None:
    if not is_deepspeed(model):
        return
    model._is_gradient_accumulation_boundary = state["boundary"]
    if state["micro_step_id"] is not None:
        model.optimizer.micro_step_id = state["micro_step_id"]
        if hasattr(model.optimizer, "_offload_accumulated_param_ids"):
            model.optimizer._offload_accumulated_param_ids = set()
    if hasattr(model.optimizer, "averaged_gradients"):
        model.optimizer.averaged_gradients.clear()
        model.optimizer.averaged_gradients.update(state["averaged_gradients"])


def _plain(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _restore_plain(module: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        now = vars(module).get(name, _UNSET)
        if now is not value:
            vars(module)[name] = value


def _buffers(module: Any) -> dict[str, tuple[Any, Any]]:
    """By name: the buffer, and its content in the host's memory."""
    found = {}
    for name, buffer in module._buffers.items():
        kept = None
        if buffer is not None and buffer.numel() <= LARGEST_BUFFER:
            kept = buffer.detach().to("cpu", copy=True)
        found[name] = (buffer, kept)
    return found


def _restore_buffers(module: Any, before: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in module._buffers if name not in before]:
        del module._buffers[name]
    for name, (buffer, kept) in before.items():
        module._buffers[name] = buffer
        # its version would not tell: kernels write to the statistics of a batch norm without counting
        if kept is not None and not torch.equal(buffer.detach().cpu(), kept):
            with torch.no_grad():
                buffer.copy_(kept)


def _random_states(device: torch.device) -> tuple[Any, ...]:
    own = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own


def _restore_random(states: tuple[Any, ...], device: torch.device) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.get_device_module(device).set_rng_state(states[3], device)
