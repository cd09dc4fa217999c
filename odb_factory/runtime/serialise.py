"""Samples and batches as bytes: pickles, with small tensors inside them and large ones beside them.

Unlike with torch's default, which is one shared-memory file for each tensor, nothing is held in `/dev/shm` and no file
descriptor outlives the transfer, however many samples the window holds.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odb_factory.runtime.allocation import allocate

LARGE = 64 * 2**10
"""Tensors from this size on lie beside the pickle, not inside it (bytes)."""

_KNOWN_TO_NUMPY = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided:
            return _rebuild_tensor, (pickle.PickleBuffer(_bytes_of(obj)), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor, in its own memory where that is contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype not in _KNOWN_TO_NUMPY or tensor.dim() != 1 or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().data


def dumps(obj: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle `obj`; CPU tensors as plain bytes, in the result or through `buffer_callback` (pickle protocol 5)."""
    out = io.BytesIO()
    _TensorPickler(out, protocol=5, buffer_callback=buffer_callback).dump(obj)
    return out.getvalue()


def loads(data: Any, buffers: Sequence[Any] | None = None) -> Any:
    """The inverse of `dumps`; tensors share the memory of `buffers`."""
    return pickle.loads(data, buffers=buffers)


@dataclass(frozen=True, slots=True)
class Serialised:
    """An object as bytes."""

    head: Any
    """Its pickle, with all that is small (bytes, or an array of them)."""
    buffers: tuple[Any, ...] = ()
    """The contents of its large tensors: views of their memory, or arrays of bytes."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The pickle and the buffers."""
        return self.head, *self.buffers

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(len(part) for part in self.parts)

    def copy(self) -> Serialised:
        """With buffers in memory of their own."""
        return Serialised(self.head, tuple(_copy(buffer) for buffer in self.buffers))

    def load(self) -> Any:
        """The object; its large tensors share the memory of the buffers."""
        return loads(self.head, self.buffers)


def serialise(obj: Any) -> Serialised:
    """`obj` as bytes; the buffers are its tensors' own memory where these are contiguous."""
    buffers: list[memoryview] = []

    def small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    return Serialised(dumps(obj, small), tuple(buffers))


def _copy(buffer: Any) -> np.ndarray:
    block = allocate(buffer.nbytes)
    np.copyto(block, np.frombuffer(buffer, np.uint8))
    return block
