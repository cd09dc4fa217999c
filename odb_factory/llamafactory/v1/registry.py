"""v1's registry of batching strategies, in the two shapes that it has had."""

from __future__ import annotations

import inspect
from typing import Any

from odb_factory.llamafactory.seams import SeamError, tested_with

METHODS = ("get_data_provider_batch_size", "compute_length", "fill_buffer", "generate_batch")
"""What `BatchGenerator` asks of a strategy."""


def register_strategy(plugin: Any, name: str, methods: type) -> None:
    """Register `methods`, a class of static methods, as the strategy `name`.

    LLaMA-Factory 0.9.5 registers functions, each under the name of its method; its successor registers one object under
    the name of the strategy, such as a class with static methods.

    Args:
        plugin: `BatchingPlugin`.
        name: of the strategy, as recipes say it.
        methods: has `METHODS`.

    Raises:
        SeamError: a registry of another shape.
    """
    register = plugin(name).register
    signature = inspect.signature(register)
    if not signature.parameters:
        register()(methods)
    elif list(signature.parameters) == ["method_name"]:
        for method in METHODS:
            register(method)(getattr(methods, method))
    else:
        where = f"{plugin.__module__}.{plugin.__name__}"
        raise SeamError(
            f"odb: {where} has register{signature}, which is neither a registry of methods nor of classes; "
            f"{tested_with()}; install a tested version, or remove odb-factory."
        )
