"""The lazy import hook: touches LLaMA-Factory's modules right after they are imported, in whichever process.

`odb_factory_hook.pth` is installed at the top of site-packages, so that it also acts in the processes that torchrun
starts. It only puts a finder before the others that looks at names; this module is imported with the first hooked one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from odb_factory.llamafactory.activate import after_import

DISABLE_VARIABLE = "ODB_FACTORY_DISABLE"
"""Set to 1 to leave LLaMA-Factory alone."""


def disabled() -> bool:
    """Whether the user switched the hook off."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no")


def find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a hooked module, with a loader that installs our hooks after the module's own code has run."""
    if disabled():
        return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        spec.loader = _HookingLoader(spec.loader)
    return spec


class _HookingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        """Whatever else loaders can do, such as `get_code` for `python -m`."""
        if name == "_loader":  # not there yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        after_import(module)
