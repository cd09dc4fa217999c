"""What a recipe or a program says of budget and updates, checked without transformers: stock runs import this, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.core.group_shapes import GroupShape
from odb_factory.option import Option, check_options, integer, number, option

SAMPLES_PER_UPDATE = Option(
    help="An optimizer update closes when so many samples were emitted over all ranks, instead of after "
    "`gradient_accumulation_steps` micro-batches: at least so many, and the step that reaches the number counts in "
    "full (`odb/samples_per_update` tells). Keeps a tuned batch size and learning rate at any budget.",
    check=integer(1, optional=True),
)
"""Declares `odb_samples_per_update`, an argument of the trainer, which `OdbConfig` does not need."""


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
    headroom: float = field(
        default=0.1,
        metadata=option(
            "Share of the memory that the worst step leaves free, with `odb_token_budget: auto`.",
            number("a share of at least 0 and below 1", lambda value: 0 <= value < 1),
        ),
    )
    """For fragmentation, and for what varies."""
    memory_limit: int | None = field(
        default=None,
        metadata=option(
            "Bytes that a rank may hold in tensors, such as 8000000000, with `odb_token_budget: auto`.",
            integer(1, optional=True, unit="bytes"),
            unset="the device's memory; on CPUs the rank's part of the host's available memory",
        ),
    )

    def __post_init__(self) -> None:
        check_options(self)


def check_samples_per_update(samples: Any, accumulation: int = 1) -> None:
    """Raise ValueError for a number of samples that cannot be, or that contradicts `gradient_accumulation_steps`."""
    SAMPLES_PER_UPDATE.require("odb_samples_per_update", samples)
    if samples is not None and accumulation > 1:
        raise ValueError(
            f"odb_samples_per_update {samples} and gradient_accumulation_steps {accumulation} both say when an update "
            "closes; remove one of them."
        )


def fields_of(args: Any, *, shuffle: bool) -> dict[str, Any]:
    """Fields of `OdbConfig` that follow from the training arguments: accumulation, seed and order."""
    return {
        "steps_multiple": args.gradient_accumulation_steps,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "shuffle": shuffle and args.train_sampling_strategy != "sequential",
    }


def with_arguments(config: OdbConfig, args: Any) -> OdbConfig:
    """`config` with accumulation, seed and order as the training arguments say."""
    return dataclasses.replace(config, **fields_of(args, shuffle=config.shuffle))
