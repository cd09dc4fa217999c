"""The recipe fields `odb*`, as part of LLaMA-Factory's own arguments: YAML, command line and `--help` know them."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from odb_factory.llamafactory.fields import FIELDS, as_dataclass_fields, check_fields, extend

if TYPE_CHECKING:
    from llamafactory.hparams.finetuning_args import FinetuningArguments
else:  # importing it leads to this module: see `extend_finetuning_arguments`
    FinetuningArguments = object


class _Checks(FinetuningArguments):
    """LLaMA-Factory's fine-tuning arguments, and ours. Without `odb: true` the others have no effect."""

    odb: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        switch, *others = FIELDS
        check_fields([switch], self)
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
        check_fields(others, self)


@cache
def extend_finetuning_arguments(stock: type) -> type:
    """`OdbFinetuningArguments`: LLaMA-Factory's `FinetuningArguments`, and our fields."""
    return extend(stock, _Checks, "OdbFinetuningArguments", as_dataclass_fields(FIELDS))


def __getattr__(name: str) -> Any:
    """`OdbFinetuningArguments`, by which pickle and programs find it."""
    if name == "OdbFinetuningArguments":
        from llamafactory.hparams.finetuning_args import FinetuningArguments

        return extend_finetuning_arguments(FinetuningArguments)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
