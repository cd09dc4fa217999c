"""The base of the mixins for `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

TrainerBase: Any = object
"""What type checkers take for it: all that a mixin calls is found in `Trainer`, later in the order of resolution."""
