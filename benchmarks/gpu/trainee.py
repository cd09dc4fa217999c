"""What is trained, and one training step, as a loop of a user's own would have it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.attention import packed_row

LEARNING_RATE = 1e-5
MAX_NORM = 1.0


class OutOfMemory(Exception):
    """The device has not enough memory for this micro-batch."""


class MasterAdamW:
    """AdamW in float32 for parameters of any dtype: master copies, gradients and both moments are float32.

    As DeepSpeed keeps them for bf16 training: 16 bytes a trained parameter, beside its bf16 weight and gradient.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        self._grads = [torch.zeros_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self._grads, strict=True):
            master.grad = grad
        self._adamw = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Clips, updates, and frees the gradients. Every parameter must have one."""
        grads: list[Any] = [parameter.grad for parameter in self.parameters]
        torch._foreach_copy_(self._grads, grads)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self._adamw.step()
        torch._foreach_copy_(self.parameters, self.masters)
        self.forget()

    def forget(self) -> None:
        """Frees the gradients of a step, or of one that failed half way."""
        for parameter in self.parameters:
            parameter.grad = None


class Trainee:
    """A model with its optimizer on one device.

    Args:
        model: in training mode.
        device: where it is.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.optimizer = MasterAdamW([parameter for parameter in model.parameters() if parameter.requires_grad])

    def step(self, batch: dict[str, Any], scale: float = 1.0) -> torch.Tensor:
        """One micro-batch, which is one update: forward, backward, optimizer. Nothing is waited for.

        Args:
            batch: of a collate function of `data`; tensors on the host, page-locked where that matters.
            scale: factor on the micro-batch's mean loss (the ODB loss scale, which is 1 on a single rank).

        Returns:
            The loss, on the device.

        Raises:
            OutOfMemory: the gradients are gone, the cache may be full (see `empty`).
        """
        with memory_errors():
            inputs = {
                name: value.to(self.device, non_blocking=True)
                for name, value in batch.items()
                if isinstance(value, torch.Tensor)
            }
            with packed_row(inputs.pop("sequences", None), batch.get("longest", 0)):
                # only the loss is kept: the logits are as large as all else together
                loss = self.model(**inputs, use_cache=False).loss * scale
                loss.backward()
            self.optimizer.step()
        return loss.detach()

    def seconds_per_step(self, batches: list[dict[str, Any]], steps: int) -> float:
        """Mean time of `steps` steps over `batches`, after each was run once."""
        for batch in batches:
            self.step(batch)
        self.wait()
        begun = time.perf_counter()
        for number in range(steps):
            self.step(batches[number % len(batches)])
        self.wait()
        return (time.perf_counter() - begun) / steps

    def wait(self) -> None:
        """Until the device has done what it was given; raises what went wrong there."""
        if self.device.type == "cuda":
            with memory_errors():
                torch.cuda.synchronize(self.device)

    def empty(self) -> None:
        """Between methods: free what the last one left, and count peaks from here on."""
        self.optimizer.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> dict[str, float]:
        """GiB since `empty`; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(self.device) / 2**30,
        }


_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns every way to run out of the device's memory into `OutOfMemory`.

    The error keeps the tensors of its step alive: leave the `except` that caught it before `Trainee.empty`.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _MEMORY_WORDS):
            raise OutOfMemory(str(error).splitlines()[0]) from error
        raise
