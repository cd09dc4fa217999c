"""A training step that runs out of memory: what it was, and by how much to lower the token budget."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from odb_factory.config import OdbConfig
from odb_factory.runtime.errors import OdbError
from odb_factory.runtime.memory import available_memory, size_in_words
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import count_patches

LEAST = 0.1
"""Share by which a budget is lowered at least."""

UNKNOWN = 0.25
"""Share by which it is lowered where nothing was measured."""

_MULTIPLE = 64
"""A budget that is advised is a multiple of this (tokens)."""

_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator for the CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class OutOfMemory(OdbError):
    """A training step ran out of memory; the message says by how much to lower the token budget."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """What is known of the step."""

    rank: int
    update: int
    """Of the run, 1-based."""
    epoch: int
    """0-based."""
    step: int
    """Within the epoch, 0-based."""
    samples: int
    """Of the micro-batch on this rank; a filler repeats one."""
    filler: bool
    padded_tokens: int
    longest: int
    """Tokens of the longest sample."""
    patches: int
    budget: int

    @classmethod
    def of(cls, info: StepInfo, inputs: Any, rank: int, update: int, config: OdbConfig) -> FailedStep:
        """Of a step with these inputs of the model, in update number `update` (1-based) of the run."""
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        padded = int(ids.numel()) if isinstance(ids, torch.Tensor) else info.padded_tokens
        width = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) and ids.dim() else padded
        return cls(
            rank=rank,
            update=update,
            epoch=info.epoch,
            step=info.step,
            samples=info.samples,
            filler=info.idle,
            padded_tokens=padded,
            longest=max(info.lengths, default=width),
            patches=count_patches(inputs) if isinstance(inputs, Mapping) else 0,
            budget=config.token_budget,
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is known of the memory (bytes); None: not known."""

    before: int | None = None
    """Held when the step began: what it found."""
    peak: int | None = None
    """Held at most, before the allocation that failed."""
    asked: int | None = None
    """What that allocation asked for."""
    total: int | None = None
    """All that the process could have held."""

    @property
    def share(self) -> float | None:
        """Part of what the step needs that was there; the step did not get to its end, so it may need still more."""
        if self.before is None or self.peak is None or self.total is None:
            return None
        needed = self.peak + (self.asked or 0) - self.before
        there = self.total - self.before
        return there / needed if needed > 0 and there > 0 else None


def lower_budget(budget: int, padded_tokens: int, share: float | None) -> int:
    """A budget whose steps should fit, after one of `padded_tokens` did not; at least 10 % below both.

    Args:
        budget: the budget (tokens).
        padded_tokens: of the step that failed (tokens).
        share: part of the memory that it needed which was there; None: not known.
    """
    kept = 1 - UNKNOWN if share is None else min(1 - LEAST, share)
    value = int(min(budget, padded_tokens) * kept)
    return max(1, value // _MULTIPLE * _MULTIPLE or value)


def describe(step: FailedStep, memory: Memory) -> str:
    """One sentence on what happened and what to do."""
    patches = f", {step.patches:,} visual patches" if step.patches else ""
    what = "a filler, which repeats one sample" if step.filler else f"{step.samples} sample{'s' * (step.samples != 1)}"
    held = []
    if memory.asked is not None:
        held.append(f"asked for {size_in_words(memory.asked)}")
    if memory.peak is not None:
        held.append(f"held {size_in_words(memory.peak)} at most")
    if memory.before is not None:
        held.append(f"{size_in_words(memory.before)} of it before the step")
    if memory.total is not None:
        held.append(f"{size_in_words(memory.total)} are there")
    details = f" ({', '.join(held)})" if held else ""
    return (
        f"rank {step.rank} ran out of memory in update {step.update} (epoch {step.epoch + 1}, step {step.step}) with a "
        f"micro-batch of {what}: {step.padded_tokens:,} padded tokens of the budget's {step.budget:,}, the longest "
        f"sample {step.longest:,} tokens{patches}{details}; "
        f"{_remedy(step, memory)}."
    )


def _remedy(step: FailedStep, memory: Memory) -> str:
    if step.samples <= 1:
        images = " or image_max_pixels" if step.patches else ""
        return (
            "a smaller budget does not help, since this is one sample alone: lower cutoff_len"
            f"{images}, leave such samples out (a budget below them with odb_overlong: drop), or use ZeRO-3 or LoRA"
        )
    lower = lower_budget(step.budget, step.padded_tokens, memory.share)
    percent = round(100 * (1 - lower / step.budget))
    if memory.share is not None:
        return f"lower the budget by at least {percent} % (odb_token_budget: {lower})"
    return (
        f"lower the budget, by {percent} % as a first try (odb_token_budget: {lower}), or let odb_token_budget: auto "
        "find one"
    )


@contextlib.contextmanager
def explained(device: torch.device, describe_step: Callable[[], FailedStep]) -> Iterator[None]:
    """An error that says that memory ran out becomes `OutOfMemory`, with the original as its cause.

    Args:
        device: where the step runs.
        describe_step: called only then.
    """
    before = _held_now(device)
    try:
        yield
    except Exception as error:
        if isinstance(error, OdbError) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(describe(describe_step(), _memory(device, before, str(error)))) from error


def _held_now(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return int(module.memory_allocated(device)) if hasattr(module, "memory_allocated") else None


def asked_bytes(text: str) -> int | None:
    """Bytes that an allocation asked for, as torch's own errors say it."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?([KMG]i?B|bytes)?", text)
    return int(float(found[1]) * _UNITS[found[2] or ""]) if found else None


def _memory(device: torch.device, before: int | None, text: str) -> Memory:
    asked = asked_bytes(text)
    if device.type == "cpu":
        return Memory(asked=asked, total=available_memory())
    module: Any = torch.get_device_module(device)
    if before is None or not hasattr(module, "mem_get_info"):
        return Memory(asked=asked)
    free, _ = module.mem_get_info(device)
    total = int(free) + int(module.memory_reserved(device))
    # nobody resets this statistic between steps, but a step that fails has gone further than those before it
    return Memory(before=before, peak=int(module.max_memory_allocated(device)), asked=asked, total=total)
