"""How much memory a step needs at its peak, and how much there is: on an accelerator, and on the CPU.

On an accelerator the allocator's own statistics say it: what it has *reserved* at most, from an empty cache, so that
what fragmentation of that step costs is part of it. On the CPU the tensors that live at the same time are counted,
whatever the C library does with their memory: the same step always gives the same number, and no other process matters.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from odb_factory.runtime.memory import available_memory


class MemoryMeter(Protocol):
    """Measures steps in bytes that the trainer process of a rank holds: weights, gradients, activations, ..."""

    capacity: int
    """Bytes that a rank may hold."""

    def peak(self, step: Callable[[], Any]) -> int:
        """Run `step`; the most bytes that were held meanwhile."""


def make_meter(
    device: torch.device, held: Iterable[torch.Tensor], beside: int, limit: int | None, local_ranks: int
) -> MemoryMeter:
    """The meter for a device.

    Args:
        device: where the model is trained.
        held: the tensors that the process holds for training; only looked at on the CPU.
        beside: bytes that it holds beside them; only looked at on the CPU.
        limit: bytes that this rank may hold, at most; None: what the device has, on a CPU the rank's part of the
            host's available memory.
        local_ranks: ranks of this host.

    Raises:
        ValueError: a device whose memory cannot be measured.
    """
    if device.type == "cpu":
        return CpuMeter(held, beside, limit, local_ranks)
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_reserved") or not hasattr(module, "mem_get_info"):
        raise ValueError(
            f"odb_token_budget: auto cannot measure the memory of a {device.type} device; set a number of tokens."
        )
    return DeviceMeter(module, device, limit)


class DeviceMeter:
    """See `MemoryMeter`; for CUDA and devices with the same statistics."""

    def __init__(self, module: Any, device: torch.device, limit: int | None) -> None:
        self._module, self._device = module, device
        gc.collect()
        module.empty_cache()
        free, _ = module.mem_get_info(device)
        # what others hold on this device, and the driver's own part, is neither free nor reserved by this process
        has = int(free) + int(module.memory_reserved(device))
        self.capacity = has if limit is None else min(has, limit)

    def peak(self, step: Callable[[], Any]) -> int:
        """See `MemoryMeter`."""
        gc.collect(1)  # what the step before left; a whole collection takes longer than a step
        self._module.synchronize(self._device)
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)
        try:
            step()
            self._module.synchronize(self._device)
            return int(self._module.max_memory_reserved(self._device))
        finally:
            self._module.empty_cache()


class CpuMeter:
    """See `MemoryMeter`."""

    def __init__(self, held: Iterable[torch.Tensor], beside: int, limit: int | None, local_ranks: int) -> None:
        self._live = LiveBytes()
        self._live.live = beside
        for tensor in held:
            self._live.add(tensor)
        available = available_memory()
        if limit is None and available is None:
            raise ValueError(
                "odb_token_budget: auto cannot find out how much memory this host has; set odb_memory_limit (bytes)."
            )
        has = self._live.live + available // max(1, local_ranks) if available is not None else limit
        assert has is not None
        self.capacity = has if limit is None else min(has, limit)

    def peak(self, step: Callable[[], Any]) -> int:
        """See `MemoryMeter`."""
        gc.collect(1)  # what the step before left; a whole collection takes longer than a step
        self._live.peak = self._live.live
        with self._live:
            step()
        return self._live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the CPU tensors that operations make while it is entered, until they are freed.

    What a kernel allocates for itself and frees again before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of the tensors known that are alive (bytes)."""
        self.peak = 0
        """The most that `live` was since somebody set it (bytes)."""
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` is alive; its storage counts once, whatever views there are of it."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if tensor.device.type != "cpu":
            return
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, or a wrapper of functorch
            return
        key = storage._cdata
        if size == 0 or key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size
