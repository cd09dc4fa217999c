"""The installers: what is put at the seams, and when. Only the start-up hook (`autoload`) imports this module.

The imports of our own modules lie in the functions, each of which runs right after LLaMA-Factory's module was imported:
a program that uses none of LLaMA-Factory's trainers, or only one of them, loads nothing for the others. None of these
modules imports the one that it extends, so it does not matter which of the two is imported first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from odb_factory.llamafactory.seams import (
    RUN_SFT,
    TRAIN_ARGS,
    V1_ARGS,
    V1_BATCHING,
    V1_GENERATOR,
    V1_TRAINER,
    SeamError,
    check_version,
    registry,
)


def after_import(module: ModuleType) -> None:
    """Install what belongs into a module that was just imported. A stock run must not suffer: a misfit only warns."""
    try:
        install = INSTALLERS.get(module.__name__)
        if install is not None:
            install()
    except Exception as error:  # whatever an unknown layout leads to
        warnings.warn(f"odb-factory is inactive: {error}", RuntimeWarning, stacklevel=2)


def _extend_arguments() -> None:
    stock = TRAIN_ARGS.check()  # first: in another version the imports may fail

    from llamafactory.hparams.finetuning_args import FinetuningArguments

    from odb_factory.llamafactory.arguments import extend_finetuning_arguments

    if FinetuningArguments not in stock:
        raise SeamError(f"odb: {TRAIN_ARGS} does not hold FinetuningArguments; reinstall a tested LLaMA-Factory.")
    ours = extend_finetuning_arguments(FinetuningArguments)
    registry.install(TRAIN_ARGS, [ours if c is FinetuningArguments else c for c in stock])


def _replace_run() -> None:
    registry.install(RUN_SFT, run_sft)


def run_sft(
    model_args: Any,
    data_args: Any,
    training_args: Any,
    finetuning_args: Any,
    generating_args: Any,
    callbacks: Any = None,
) -> Any:
    """LLaMA-Factory's `run_sft`: stock, or with Online Dynamic Batching where the recipe says `odb: true`.

    Raises:
        SeamError: this LLaMA-Factory does not fit.
        ValueError: see `run_online`.
    """
    arguments = (model_args, data_args, training_args, finetuning_args, generating_args, callbacks)
    if not getattr(finetuning_args, "odb", False):
        return registry.original(RUN_SFT)(*arguments)
    check_version()  # first: in another version the import may fail

    from odb_factory.llamafactory.run import run_online

    return run_online(*arguments)


def _extend_v1_arguments() -> None:
    stock = V1_ARGS.check()

    from odb_factory.llamafactory.v1.arguments import extend_training_arguments

    registry.install(V1_ARGS, extend_training_arguments(stock))


def _register_in_v1() -> None:
    plugin = V1_BATCHING.check()

    from odb_factory.llamafactory.v1.arguments import STRATEGY
    from odb_factory.llamafactory.v1.registry import register_strategy
    from odb_factory.llamafactory.v1.strategy import OdbBatching

    register_strategy(plugin, STRATEGY, OdbBatching)


def _extend_v1_trainer() -> None:
    stock = V1_TRAINER.check()
    V1_GENERATOR.check()

    from odb_factory.llamafactory.v1.trainer import extend_sft_trainer

    registry.install(V1_TRAINER, extend_sft_trainer(stock))


INSTALLERS: dict[str, Callable[[], None]] = {
    TRAIN_ARGS.module: _extend_arguments,
    RUN_SFT.module: _replace_run,
    V1_ARGS.module: _extend_v1_arguments,
    V1_BATCHING.module: _register_in_v1,
    V1_TRAINER.module: _extend_v1_trainer,
}
"""By the module of LLaMA-Factory that was imported; `odb_factory_hook.pth` names the same modules."""
