"""Training arguments that Online Dynamic Batching cannot work with: one sentence and the remedy for each."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from odb_factory.config import OdbConfig
from odb_factory.trainer import hf_adapter
from odb_factory.trainer.options import check_samples_per_update
from odb_factory.trainer.schedule import pace_of

_STEP_IN_BACKWARD = ("lomo", "adalomo")
"""Optimizers that change the weights within every backward pass."""


def contradictions(args: Any, samples_per_update: int | None = None) -> list[tuple[bool, str]]:
    """Training arguments that mean something else than `odb: true`: whether each applies, and what to say then."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    accumulates = args.gradient_accumulation_steps > 1 or samples_per_update is not None
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
            optimizer.endswith("_layerwise"),
            f"optim {optimizer} counts the steps of its learning rates itself; use "
            f"{optimizer.removesuffix('_layerwise')}.",
        ),
        (
            optimizer in _STEP_IN_BACKWARD and accumulates,
            f"optim {optimizer} changes the weights with every micro-batch, so an update cannot have several; remove "
            "odb_samples_per_update and gradient_accumulation_steps, or use another optim.",
        ),
        (bool(args.label_smoothing_factor and args.torch_compile), unshifted("a compiled model", "torch_compile")),
    ]


def unshifted(model: str, other: str = "") -> str:
    """What to say of label smoothing where Trainer does not shift labels: it looks the model's class up in a list."""
    remedy = f"remove label_smoothing_factor, or {other}." if other else "remove label_smoothing_factor."
    return (
        f"label_smoothing_factor: transformers does not shift the labels of {model}, which would learn to repeat each "
        f"token instead of predicting the next one; {remedy}"
    )


def check_label_smoothing(args: Any, model: Any) -> None:
    """Raise ValueError where Trainer's label smoothing is no mean over the targets of `model`."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    name = type(inner).__name__
    if args.label_smoothing_factor and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(f"odb: {unshifted(name)}")


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
    hf_adapter.check_layout()
    check_samples_per_update(samples_per_update, args.gradient_accumulation_steps)
    problems = [
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (torch.nn.DataParallel) are not supported; start one process a GPU with "
            "torchrun (FORCE_TORCHRUN=1).",
        ),
        *contradictions(args, samples_per_update),
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
