"""Nested structures of tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to its tensors; dicts (also those of tokenizers), lists and tuples are rebuilt.

    Anything else stays the object that it is: such a mapping may be more than its items.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        return type(value)({key: map_tensors(item, change) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value
