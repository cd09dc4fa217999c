"""The recipe fields `odb*`, as part of LLaMA-Factory's own arguments: YAML, command line and `--help` know them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from odb_factory.llamafactory.fields import OdbFields, extend, option
from odb_factory.trainer.options import check_headroom, check_memory_limit

if TYPE_CHECKING:
    from llamafactory.hparams.finetuning_args import FinetuningArguments
else:  # it is not imported here, since its own import leads to this module: see `extend_finetuning_arguments`
    FinetuningArguments = object


@dataclass
class _Fields(OdbFields, FinetuningArguments):
    """LLaMA-Factory's fine-tuning arguments, and ours. Without `odb: true` the others have no effect."""

    odb: bool = option(
        False, "Form batches online under a token budget, aligned over all ranks (Online Dynamic Batching)."
    )
    odb_auto_headroom: float = option(
        0.1, "With odb_token_budget auto: share of the memory that the worst step must leave free."
    )
    odb_memory_limit: int | None = option(
        None,
        "With odb_token_budget auto: bytes that a rank may hold in tensors. Default: what its accelerator has; on CPUs "
        "the rank's part of the host's available memory.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.odb, bool):  # a quoted "false" would count as true
            raise ValueError(f"odb must be true or false, got {self.odb!r}.")
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
        self.check_odb_fields()
        check_headroom("odb_auto_headroom", self.odb_auto_headroom)
        check_memory_limit("odb_memory_limit", self.odb_memory_limit)


@cache
def extend_finetuning_arguments(stock: type) -> type:
    """`OdbFinetuningArguments`: LLaMA-Factory's `FinetuningArguments`, and our fields."""
    return extend(stock, _Fields, "OdbFinetuningArguments", __name__)


def __getattr__(name: str) -> Any:
    """`OdbFinetuningArguments`, by which pickle and programs find it."""
    if name == "OdbFinetuningArguments":
        from llamafactory.hparams.finetuning_args import FinetuningArguments

        return extend_finetuning_arguments(FinetuningArguments)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
