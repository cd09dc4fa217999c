"""The recipe fields of v1: `batching_strategy: odb`, and those that begin with `odb_`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.fields import OdbFields, extend, option

if TYPE_CHECKING:
    from llamafactory.v1.config.training_args import TrainingArguments
else:  # it is not imported here, since its own import leads to this module: see `extend_training_arguments`
    TrainingArguments = object

STRATEGY = "odb"


@dataclass
class _Fields(OdbFields, TrainingArguments):
    """v1's training arguments, and ours. Without `batching_strategy: odb` those have no effect."""

    odb_token_budget: int | None = option(  # type: ignore[assignment]  # `auto` is for v0
        None,
        "Most padded tokens in a micro-batch. Default: micro_batch_size x cutoff_len, the worst case that the "
        "fixed-batch recipe fits.",
    )
    odb_samples_per_update: int | None = option(
        None,
        "An optimizer update closes when so many samples were emitted since the last one, over all ranks, instead of "
        "after the micro-batches that global_batch_size asks for. Default: those micro-batches.",
    )

    if TYPE_CHECKING:
        batching_strategy: Any = STRATEGY

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
        self.check_odb_fields()
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
        budget: Any = self.odb_token_budget
        return self.odb_config(
            budget=self.micro_batch_size * self.cutoff_len if budget is None else budget,
            seed=self.seed,
            steps_multiple=num_micro_batch,
            attention_length=self.attention_length(
                lambda: model.config, longest=self.cutoff_len, trained=_mostly_trained(model)
            ),
        )


def _mostly_trained(model: Any) -> bool:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return 2 * sum(size for size, trained in sizes if trained) > sum(size for size, _ in sizes)


@cache
def extend_training_arguments(stock: type) -> type:
    """`OdbTrainingArguments`: v1's `TrainingArguments`, and our fields."""
    (strategy,) = (item for item in fields(stock) if item.name == "batching_strategy")
    known = type(strategy.default)
    # v1's enumeration is closed: what the command line may say is a wider one of the same name
    wider = StrEnum(known.__name__, {**{item.name: item.value for item in known}, "ODB": STRATEGY})  # type: ignore[misc]
    choice = [(strategy.name, wider, field(default=strategy.default, metadata=strategy.metadata))]
    ours = make_dataclass("_FieldsAndStrategy", choice, bases=(_Fields,))
    return extend(stock, ours, "OdbTrainingArguments", __name__)


def __getattr__(name: str) -> Any:
    """`OdbTrainingArguments`, by which pickle and programs find it."""
    if name == "OdbTrainingArguments":
        from llamafactory.v1.config.training_args import TrainingArguments

        return extend_training_arguments(TrainingArguments)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
