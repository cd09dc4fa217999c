"""The recipe fields of v1: `batching_strategy: odb`, and those that begin with `odb_`."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.fields import FIELDS, RecipeField, as_dataclass_fields, check_fields, extend
from odb_factory.llamafactory.resolve import resolve

if TYPE_CHECKING:
    from llamafactory.v1.config.training_args import TrainingArguments
else:  # importing it leads to this module: see `extend_training_arguments`
    TrainingArguments = object

STRATEGY = "odb"

NOT_IN_V1 = ("odb", "odb_auto_headroom", "odb_memory_limit")
"""Fields of recipes without v1: `batching_strategy` takes the place of the first, and no budget is found."""

IN_V1: dict[str, dict[str, Any]] = {
    "odb_token_budget": {
        "help": "Most padded tokens in a micro-batch. The default is the worst case that the fixed-batch recipe fits.",
        "unset": "`micro_batch_size` x `cutoff_len`",
        "auto": False,
    },
    "odb_samples_per_update": {
        "help": "An optimizer update closes when so many samples were emitted since the last one, over all ranks, "
        "instead of after the micro-batches that `global_batch_size` asks for.",
    },
}
"""What the declarations of fields say otherwise in v1."""


def _in_v1(field: RecipeField) -> RecipeField:
    option = dataclasses.replace(field.option, **IN_V1.get(field.name, {}))
    kind = int | None if field.option.auto and not option.auto else field.type
    return dataclasses.replace(field, type=kind, option=option)


V1_FIELDS = tuple(_in_v1(field) for field in FIELDS if field.name not in NOT_IN_V1)


class _Checks(TrainingArguments):
    """v1's training arguments, and ours. Without `batching_strategy: odb` those have no effect."""

    if TYPE_CHECKING:
        batching_strategy: Any
        odb_token_budget: int | None
        odb_samples_per_update: int | None
        odb_idle: str

    def __post_init__(self) -> None:
        from llamafactory.v1.config.arg_utils import BatchingStrategy

        if self.batching_strategy in list(BatchingStrategy) and isinstance(self.batching_strategy, StrEnum):
            self.batching_strategy = BatchingStrategy(self.batching_strategy)  # as stock v1 has it
        super().__post_init__()
        if self.batching_strategy == STRATEGY:
            self.batching_strategy = STRATEGY
            self._check()

    def _check(self) -> None:
        if self.odb_token_budget is not None and not isinstance(self.odb_token_budget, int):
            raise ValueError(
                f"odb_token_budget must be a number of tokens in v1, got {self.odb_token_budget!r}; `auto` works "
                "without USE_V1 only."
            )
        check_fields(V1_FIELDS, self)
        sharding = self.dist_config or {}
        problems = (
            (
                sharding.get("cp_size", 1) > 1,
                "needs whole samples on each rank, so dist_config must not have a cp_size above 1; set it to 1.",
            ),
            (
                self.save_epochs is not None and not self.save_epochs > 0,
                f"needs save_epochs above 0, not {self.save_epochs!r}; remove it, or give a number of epochs.",
            ),
            (
                self.odb_idle == "skip",
                "needs as many micro-batches on each rank; remove odb_idle: skip.",
            ),
            (
                self.lr_scheduler_config is not None and not (self.max_steps or 0) > 0,
                "has no number of updates to make a schedule of (lr_scheduler_config) before the run ends; set "
                "max_steps, or remove lr_scheduler_config.",
            ),
            (
                self.odb_samples_per_update is not None and sharding.get("name") == "deepspeed",
                "with DeepSpeed has a fixed number of micro-batches an update; remove odb_samples_per_update, and set "
                "global_batch_size.",
            ),
        )
        for applies, sentence in problems:
            if applies:
                raise ValueError(f"batching_strategy: {STRATEGY} {sentence}")

    def recipe_config(self, num_micro_batch: int, model: Any) -> OdbConfig:
        """The `OdbConfig` of these fields, for `num_micro_batch` micro-batches an update.

        Args:
            model: the `PreTrainedModel` that is trained.

        Raises:
            ValueError: see `OdbConfig`, and `odb_samples_per_update` with a `global_batch_size` that contradicts it.
        """
        if num_micro_batch > 1 and self.odb_samples_per_update is not None:
            raise ValueError(
                f"odb_samples_per_update {self.odb_samples_per_update} and global_batch_size {self.global_batch_size} "
                "both say when an update closes; remove one of them."
            )
        return resolve(
            self,
            fixed_budget=self.micro_batch_size * self.cutoff_len,
            model_config=lambda: model.config,
            longest=self.cutoff_len,
            trained=_mostly_trained(model),
            seed=self.seed,
            steps_multiple=num_micro_batch,
        )


def _mostly_trained(model: Any) -> bool:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return 2 * sum(size for size, trained in sizes if trained) > sum(size for size, _ in sizes)


@cache
def extend_training_arguments(stock: type) -> type:
    """`OdbTrainingArguments`: v1's `TrainingArguments`, and our fields."""
    (strategy,) = (item for item in dataclasses.fields(stock) if item.name == "batching_strategy")
    known = type(strategy.default)
    # v1's enumeration is closed: what the command line may say is a wider one of the same name
    wider = StrEnum(known.__name__, {**{item.name: item.value for item in known}, "ODB": STRATEGY})  # type: ignore[misc]
    choice = (strategy.name, wider, dataclasses.field(default=strategy.default, metadata=strategy.metadata))
    return extend(stock, _Checks, "OdbTrainingArguments", [choice, *as_dataclass_fields(V1_FIELDS)])


def __getattr__(name: str) -> Any:
    """`OdbTrainingArguments`, by which pickle and programs find it."""
    if name == "OdbTrainingArguments":
        from llamafactory.v1.config.training_args import TrainingArguments

        return extend_training_arguments(TrainingArguments)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
