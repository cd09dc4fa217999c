"""Online Dynamic Batching for LLaMA-Factory.

Importing this package imports no torch: public names are loaded on use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from odb_factory.version import __version__

if TYPE_CHECKING:
    from odb_factory.config import OdbConfig
    from odb_factory.core.sample import BadSample, DropSample, SampleMeta
    from odb_factory.runtime.loader import OdbDataLoader
    from odb_factory.runtime.messages import StepInfo
    from odb_factory.trainer.mixin import OdbTrainerMixin

_HOME = {
    "OdbConfig": "odb_factory.config",
    "BadSample": "odb_factory.core.sample",
    "DropSample": "odb_factory.core.sample",
    "SampleMeta": "odb_factory.core.sample",
    "OdbDataLoader": "odb_factory.runtime.loader",
    "StepInfo": "odb_factory.runtime.messages",
    "OdbTrainerMixin": "odb_factory.trainer.mixin",
}

__all__ = [
    "BadSample",
    "DropSample",
    "OdbConfig",
    "OdbDataLoader",
    "OdbTrainerMixin",
    "SampleMeta",
    "StepInfo",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'odb_factory' has no attribute {name!r}")
