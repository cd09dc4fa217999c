"""The seams: names in LLaMA-Factory that we replace, the shape that each must have, and what is replaced now.

Imports nothing of ours; what is put at the seams is in `odb_factory.llamafactory.activate`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TESTED_VERSIONS = ("0.9.5",)


class SeamError(RuntimeError):
    """LLaMA-Factory does not look as it did when the seams were written down."""


def _version() -> str:
    try:
        return importlib.metadata.version("llamafactory")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def tested_with() -> str:
    """The versions that were tested, and the one that is installed, in words."""
    return f"tested with LLaMA-Factory {', '.join(TESTED_VERSIONS)}, this is {_version()}"


def untested_version() -> str | None:
    """What a user should know of a LLaMA-Factory that was not tested; None: it was."""
    return None if _version() in TESTED_VERSIONS else tested_with()


def check_version() -> None:
    """SeamError for a LLaMA-Factory whose seams were not tested, however alike they look."""
    if untested := untested_version():
        seams = ", ".join(map(str, SEAMS))
        raise SeamError(f"odb: the seams {seams} were {untested}; install a tested version, or remove odb.")


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in a module of LLaMA-Factory that is replaced."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    """Parameters that a function or a class's constructor must have."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def check(self) -> Any:
        """The current value; SeamError if it is missing or has another shape."""
        tested = tested_with()
        value = getattr(importlib.import_module(self.module), self.name, None)
        if value is None:
            raise SeamError(f"odb: the seam {self} is missing ({tested}); reinstall LLaMA-Factory in a tested version.")
        if self.parameters:
            there = inspect.signature(value).parameters
            missing = [p for p in self.parameters if p not in there]
            if missing:
                raise SeamError(
                    f"odb: the seam {self} has no parameter {missing[0]} ({tested}); reinstall LLaMA-Factory in a "
                    "tested version."
                )
        return value


TRAIN_ARGS = Seam("llamafactory.hparams.parser", "_TRAIN_ARGS")
RUN_SFT = Seam(
    "llamafactory.train.tuner",
    "run_sft",
    ("model_args", "data_args", "training_args", "finetuning_args", "generating_args", "callbacks"),
)
PREPROCESS = Seam(
    "llamafactory.data.loader",
    "_get_preprocessed_dataset",
    ("dataset", "data_args", "training_args", "stage", "template", "tokenizer", "processor", "is_eval"),
)
TRAINER = Seam("llamafactory.train.sft.workflow", "CustomSeq2SeqTrainer", ("finetuning_args", "processor"))

SEAMS = (TRAIN_ARGS, RUN_SFT, PREPROCESS, TRAINER)
"""The seams of a run with `odb: true`: the first two are touched on import, the others only while it lasts."""

V1_ARGS = Seam(
    "llamafactory.v1.config.arg_parser",
    "TrainingArguments",
    ("batching_strategy", "micro_batch_size", "cutoff_len", "num_train_epochs", "max_steps", "save_epochs", "seed"),
)
V1_BATCHING = Seam("llamafactory.v1.plugins.trainer_plugins.batching", "BatchingPlugin", ("name",))
V1_TRAINER = Seam("llamafactory.v1.trainers.sft_trainer", "SFTTrainer", ("args", "model", "renderer", "train_dataset"))
V1_GENERATOR = Seam(
    "llamafactory.v1.core.base_trainer",
    "BatchGenerator",
    ("dataset", "renderer", "micro_batch_size", "global_batch_size", "cutoff_len", "batching_strategy"),
)

V1_SYNCHRONIZE = Seam("llamafactory.v1.accelerator.helper", "synchronize")

V1_SEAMS = (V1_ARGS, V1_TRAINER, V1_GENERATOR, V1_SYNCHRONIZE)
"""The seams of v1, beside the registry at `V1_BATCHING`: the first two are touched on import, the third while a trainer
with `batching_strategy: odb` is made, the last while it trains on CPUs."""


class Registry:
    """What is installed now."""

    def __init__(self) -> None:
        self._originals: dict[Seam, Any] = {}

    @property
    def installed(self) -> tuple[Seam, ...]:
        """The seams that are replaced now, in the order of installation."""
        return tuple(self._originals)

    def original(self, seam: Seam) -> Any:
        """What LLaMA-Factory had at an installed seam."""
        return self._originals[seam]

    def install(self, seam: Seam, replacement: Any) -> None:
        """Replace what is at `seam`; RuntimeError if it is replaced already, SeamError if it does not fit."""
        if seam in self._originals:
            raise RuntimeError(f"the seam {seam} is replaced already")
        self._originals[seam] = seam.check()
        setattr(importlib.import_module(seam.module), seam.name, replacement)

    def restore(self, seam: Seam) -> None:
        """Put back what LLaMA-Factory had at `seam`."""
        setattr(importlib.import_module(seam.module), seam.name, self._originals.pop(seam))

    def restore_all(self) -> None:
        """Put everything back."""
        for seam in reversed(self.installed):
            self.restore(seam)

    @contextlib.contextmanager
    def replaced(self, replacements: dict[Seam, Any]) -> Iterator[None]:
        """Replace several seams for a while."""
        done: list[Seam] = []
        try:
            for seam, replacement in replacements.items():
                self.install(seam, replacement)
                done.append(seam)
            yield
        finally:
            for seam in reversed(done):
                self.restore(seam)


registry = Registry()
