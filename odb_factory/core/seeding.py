"""Random generators that depend on names, not on the order in which they are asked for."""

from __future__ import annotations

import random


def generator(seed: int, *scope: int | str) -> random.Random:
    """A generator for `scope`, the same on every machine and Python version for the same arguments."""
    return random.Random(":".join(map(str, (seed, *scope))))
