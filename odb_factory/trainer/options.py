"""What a recipe or a program says of budget and updates, checked without transformers: stock runs import this, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.core.group_shapes import GroupShape

AUTO = "auto"
"""Value of `odb_token_budget` that has the budget found before training."""


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """What the search for a token budget needs to know.

    Raises:
        ValueError: one sentence that names the field, its value and what is allowed.
    """

    make_batch: Callable[[GroupShape], Any]
    """Makes a micro-batch as training's collate function does, on the CPU, of samples of these lengths."""
    longest: int
    """Most tokens that a sample may have, such as the cutoff length."""
    media: bool = False
    """Samples may hold images; `make_batch` then gets shapes of the kind `media` too."""
    headroom: float = 0.1
    """Share of the memory that the worst step must leave free: for fragmentation, and for what varies."""
    memory_limit: int | None = None
    """Bytes that this rank may hold in tensors; None: all that the device has, or the rank's part of the host's."""

    def __post_init__(self) -> None:
        check_headroom("headroom", self.headroom)
        check_memory_limit("memory_limit", self.memory_limit)


def check_headroom(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a share below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a share of at least 0 and below 1, got {value!r}.")


def check_memory_limit(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is None or a number of bytes."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a positive integer (bytes), got {value!r}.")


def check_samples_per_update(number: Any, accumulation: int = 1) -> None:
    """Raise ValueError for a number of samples that cannot be, or that contradicts `gradient_accumulation_steps`."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"odb_samples_per_update must be a positive integer, got {number!r}.")
    if accumulation > 1:
        raise ValueError(
            f"odb_samples_per_update {number} and gradient_accumulation_steps {accumulation} both say when an update "
            "closes; remove one of them."
        )


def with_arguments(config: OdbConfig, args: Any) -> OdbConfig:
    """`config` with accumulation, seed and order as the training arguments say."""
    return dataclasses.replace(
        config,
        steps_multiple=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=config.shuffle and args.train_sampling_strategy != "sequential",
    )
