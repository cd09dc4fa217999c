"""The recipe fields `odb*`, as part of LLaMA-Factory's own arguments: YAML, command line and `--help` know them."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from typing import Any, Literal

from llamafactory.hparams.finetuning_args import FinetuningArguments

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.hooks import resume
from odb_factory.trainer.options import AUTO, check_headroom, check_memory_limit, check_samples_per_update

DEFAULTS = OdbConfig(token_budget=1)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


class TokenBudget:
    """What a command-line flag says of the budget: a number of tokens, or `auto`. Its values are int or str."""

    def __new__(cls, text: str) -> Any:
        try:
            return text if text == AUTO else int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a number of tokens, or {AUTO}, got {text!r}") from None


@dataclass
class OdbFinetuningArguments(FinetuningArguments):
    """LLaMA-Factory's fine-tuning arguments, and ours. Without `odb: true` the others have no effect."""

    odb: bool = _option(
        False, "Form batches online under a token budget, aligned over all ranks (Online Dynamic Batching)."
    )
    odb_token_budget: TokenBudget | None = field(
        default=None,
        metadata={
            "help": "Most padded tokens in a micro-batch, or auto: the most that fits into memory, found first. "
            "Default: per_device_train_batch_size x cutoff_len, the worst case that the fixed-batch recipe fits."
        },
    )
    odb_auto_headroom: float = _option(
        0.1, "With odb_token_budget auto: share of the memory that the worst step must leave free."
    )
    odb_memory_limit: int | None = _option(
        None,
        "With odb_token_budget auto: bytes that a rank may hold in tensors. Default: what its accelerator has; on CPUs "
        "the rank's part of the host's available memory.",
    )
    odb_samples_per_update: int | None = _option(
        None,
        "An optimizer update closes when so many samples were emitted since the last one, over all ranks, instead of "
        "after gradient_accumulation_steps micro-batches. Keeps a tuned batch size and learning rate at any budget. "
        "Default: those micro-batches.",
    )
    odb_depth: int = _option(
        DEFAULTS.depth, "D: samples that a rank holds ready to choose from. More: less padding, more host memory."
    )
    odb_alignment: Literal["carry", "max"] = _option(
        DEFAULTS.alignment,
        "How the ranks agree on the steps of a round: `carry` lets only full groups go before the end of the epoch, "
        "`max` is the paper's rule.",
    )
    odb_split: Literal["balanced", "singleton"] = _option(
        DEFAULTS.split, "How a rank with too few groups makes more: halve the costliest, or the paper's single samples."
    )
    odb_join: bool = _option(
        DEFAULTS.join,
        "True: train on every sample once an epoch. False: the epoch ends when odb_quota of them are trained on.",
    )
    odb_quota: float = _option(
        DEFAULTS.quota,
        "Without odb_join: share of the samples after which an epoch ends; the rest is left and counted.",
    )
    odb_overlong: Literal["keep", "drop", "error"] = _option(
        DEFAULTS.overlong,
        "A sample longer than the budget: train on it alone, drop it (counted), or stop with an error.",
    )
    odb_on_bad_sample: Literal["raise", "skip"] = _option(
        DEFAULTS.on_bad_sample,
        "A sample that cannot be read or used (corrupt media, wrong placeholders, no label left): stop with an error, "
        "or skip it (counted and named).",
    )
    odb_max_bad_samples: int | None = _option(
        DEFAULTS.max_bad_samples,
        "With odb_on_bad_sample skip: more bad samples in an epoch end the run. null: no bound.",
    )
    odb_max_samples: int | None = _option(None, "Most samples in a micro-batch. Default: no bound.")
    odb_max_patches: int | None = _option(
        None, "Most visual patches in a micro-batch of several samples. Default: no bound."
    )
    odb_assignment: Literal["shared", "static"] = _option(
        DEFAULTS.assignment,
        "Which rank reads which sample: the one whose window lacks some, or fixed shares of the epoch's order.",
    )
    odb_idle: Literal["filler", "skip"] = _option(
        DEFAULTS.idle, "What a rank without a group runs: a filler of weight zero, or nothing (one rank only)."
    )
    odb_max_wait: int = _option(DEFAULTS.max_wait, "Rounds for which a sample may be held back by `carry`.")
    odb_capacity: int | None = _option(None, "Most groups that a rank emits in a round. Default: no bound.")
    odb_window_bytes: int | None = _option(
        None, "Most bytes of samples that a rank holds ready. Default: a share of the host's available memory."
    )
    odb_queue_steps: int = _option(DEFAULTS.queue_steps, "Finished micro-batches that wait for the trainer, at most.")
    odb_ramp: bool = _option(
        DEFAULTS.ramp, "Begin an epoch with smaller windows, so that the first step comes quickly."
    )
    odb_audit: bool = _option(
        False, "Write odb_audit.rank{r}.jsonl into output_dir: a line a step with the indices of its samples."
    )
    odb_timeout: float = _option(
        DEFAULTS.timeout, "Seconds that a rank waits for another one, or for its own data, before it raises."
    )
    odb_port: int = _option(
        DEFAULTS.port, "TCP port of rank 0's machine where the ranks' collate processes meet; 0: any free one."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("odb", "odb_audit"):  # a quoted "false" would count as true
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if not self.odb:
            return
        if self.stage != "sft":
            raise ValueError(f"odb: true supports stage sft, not {self.stage}; remove odb from this recipe.")
        if getattr(self, "use_hyper_parallel", False):
            raise ValueError("odb: true does not support use_hyper_parallel; remove one of them.")
        if (self.use_galore and self.galore_layerwise) or (self.use_apollo and self.apollo_layerwise):
            raise ValueError(
                "odb: true does not support galore_layerwise and apollo_layerwise, whose learning rates count steps; "
                "remove them."
            )
        if os.environ.get("USE_MCA", "").lower() in ("1", "true", "y"):
            raise ValueError("odb: true does not support Megatron training (USE_MCA); unset it or remove odb.")
        # the budget may depend on other arguments; everything else is checked now, before anything is loaded
        given: Any = self.odb_token_budget
        if isinstance(given, str) and given != AUTO:
            raise ValueError(f"odb_token_budget must be a positive integer, or {AUTO}, got {given!r}.")
        self.odb_config(budget=1 if given in (None, AUTO) else given, pad_to_multiple_of=1)
        check_samples_per_update(self.odb_samples_per_update)
        check_headroom("odb_auto_headroom", self.odb_auto_headroom)
        check_memory_limit("odb_memory_limit", self.odb_memory_limit)

    def odb_config(self, *, budget: int, **more: Any) -> OdbConfig:
        """The `OdbConfig` of these fields.

        Args:
            budget: the token budget (tokens).
            more: fields of `OdbConfig` that are no recipe fields.

        Raises:
            ValueError: a field has an impossible value; the text names the recipe field.
        """
        names = (
            "depth",
            "alignment",
            "split",
            "join",
            "quota",
            "overlong",
            "on_bad_sample",
            "max_bad_samples",
            "max_samples",
            "max_patches",
            "assignment",
            "idle",
            "max_wait",
            "capacity",
            "window_bytes",
            "queue_steps",
            "ramp",
            "timeout",
            "port",
        )
        values = {name: getattr(self, f"odb_{name}") for name in names}
        try:
            return OdbConfig(token_budget=budget, **values, **more)
        except ValueError as error:
            raise ValueError(f"odb_{error}") from None


resume()
