"""The recipe of each method: the same but for the batching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.task import CUTOFF, DATASET, TEMPLATE

OWN: dict[str, dict[str, Any]] = {
    "standard": {},
    "sorted": {"train_sampling_strategy": "group_by_length"},
    "packing": {"packing": True, "neat_packing": True},
    "odb": {"odb": True},
    "odb same samples": {"odb": True},
    "odb scaled rate": {"odb": True},
}
"""What a method adds to the common recipe; the last two: see `recipe`."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained, the same for every method."""

    samples: int
    held_out: int
    epochs: int
    batch_size: int = 2
    """Samples of a rank's micro-batch of Standard and Sorted, rows of packing; ODB's budget is x cutoff."""
    accumulation: int = 4
    """Micro-batches of an update; not with `odb same samples`. Small ones, so that few samples complete an update."""
    layers: int = 2
    hidden: int = 128
    ranks: int = 2

    @property
    def budget(self) -> int:
        """Padded tokens of a micro-batch, at most."""
        return self.batch_size * CUTOFF

    @property
    def samples_per_update(self) -> int:
        """Of Standard, over all ranks."""
        return self.batch_size * self.accumulation * self.ranks


def scaled_rate(rate: float, ratio: float) -> float:
    """The learning rate for updates of `ratio` times as many samples: by the square root, as is usual with Adam."""
    return rate * math.sqrt(ratio)


def recipe(
    place: Path, method: str, size: Size, *, output: Path, seed: int, rate: float, more_samples: float = 1.0
) -> dict[str, Any]:
    """The recipe of `method`.

    Args:
        place: holds `model` and `data`.
        rate: learning rate of Standard.
        more_samples: samples in an update of ODB / of Standard, for `odb scaled rate`.
    """
    values: dict[str, Any] = {
        "model_name_or_path": str(place / f"model_{seed}"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(place / "data"),
        "dataset": DATASET,
        "template": TEMPLATE,
        "cutoff_len": CUTOFF,
        "dataloader_num_workers": 1,
        "per_device_train_batch_size": size.batch_size,
        "gradient_accumulation_steps": size.accumulation,
        "learning_rate": scaled_rate(rate, more_samples) if method == "odb scaled rate" else rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "num_train_epochs": size.epochs,
        "seed": seed,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "output_dir": str(output),
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": "none",
    }
    if method == "odb same samples":
        values["odb_samples_per_update"] = size.samples_per_update
        del values["gradient_accumulation_steps"]  # one of the two decides when an update closes
    return values | OWN[method]
