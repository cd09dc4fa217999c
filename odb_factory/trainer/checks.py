"""Training arguments that Online Dynamic Batching cannot work with: one sentence and the remedy for each."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from odb_factory.config import OdbConfig
from odb_factory.trainer.options import check_samples_per_update
from odb_factory.trainer.schedule import pace_of

_HOOKED = (
    "_run_epoch",
    "_init_training_state",
    "_save_checkpoint",
    "get_batch_samples",
    "set_initial_training_values",
    "_finalize_training",
    "_prepare_for_training",
)


def contradictions(args: Any) -> list[tuple[bool, str]]:
    """Training arguments that mean something else than `odb: true`: whether each applies, and what to say then."""
    return [
        (
            args.train_sampling_strategy == "group_by_length",
            "train_sampling_strategy: group_by_length groups by length in another way; remove it.",
        ),
        (
            bool(args.auto_find_batch_size),
            "auto_find_batch_size lowers a number of samples, while odb bounds tokens; remove it and lower "
            "odb_token_budget instead.",
        ),
        (
            bool(args.dataloader_drop_last),
            "dataloader_drop_last leaves samples out, while odb emits every sample once; remove it.",
        ),
        (
            "layerwise" in str(getattr(args.optim, "value", args.optim)),
            f"optim {getattr(args.optim, 'value', args.optim)} steps once a micro-batch, and its learning "
            "rates count these steps; use the same without layerwise.",
        ),
    ]


def needs_steps(args: Any) -> tuple[bool, str]:
    """Whether the schedule needs a number of updates that is not known, and what to say then."""
    if args.max_steps > 0:
        return False, ""
    try:
        pace_of(args)
    except ValueError as error:
        return True, str(error)
    return False, ""


def needs_fillers(config: OdbConfig, world_size: int, accumulation: int) -> tuple[bool, str]:
    """Whether `odb_idle: skip` leaves ranks or updates without what they wait for, and what to say then."""
    return config.idle == "skip" and (world_size > 1 or accumulation > 1), (
        "odb_idle: skip is for own training loops with DDP Join; a Trainer on several ranks, or one that accumulates "
        "gradients, needs filler."
    )


def check_arguments(args: Any, config: OdbConfig, accelerator: Any, samples_per_update: int | None = None) -> None:
    """Raise ValueError for training arguments that contradict `config`, RuntimeError for an unknown Trainer layout."""
    missing = [name for name in _HOOKED if not hasattr(Trainer, name)]
    if missing:
        raise RuntimeError(
            f"odb: this version of transformers has no Trainer.{missing[0]}; tested with transformers 5.6."
        )
    check_samples_per_update(samples_per_update, args.gradient_accumulation_steps)
    problems = [
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (torch.nn.DataParallel) are not supported; start one process a GPU with "
            "torchrun (FORCE_TORCHRUN=1).",
        ),
        *contradictions(args),
        needs_fillers(config, args.world_size, args.gradient_accumulation_steps),
        (
            _model_parallel(accelerator),
            "tensor, context and sequence parallelism are not supported with odb: true; use data parallelism (DDP, "
            "ZeRO, FSDP).",
        ),
    ]
    for applies, sentence in problems:
        if applies:
            raise ValueError(f"odb: {sentence}")


def _model_parallel(accelerator: Any) -> bool:
    layout = getattr(accelerator, "parallelism_config", None)
    return layout is not None and getattr(layout, "non_data_parallel_size", 1) > 1
