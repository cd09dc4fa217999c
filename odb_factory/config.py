"""The one configuration object of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from odb_factory.version import __version__

CHOICES: Mapping[str, tuple[str, ...]] = {
    "alignment": ("carry", "max"),
    "split": ("balanced", "singleton"),
    "overlong": ("keep", "drop", "error"),
    "idle": ("filler", "skip"),
    "assignment": ("shared", "static"),
    "on_bad_sample": ("raise", "skip"),
    "start_method": ("fork", "spawn"),
}


LOCAL_FIELDS = ("timeout", "queue_steps", "start_method", "window_bytes", "port")
"""Fields that may differ between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """What Online Dynamic Batching needs to know; the same on every rank.

    Raises:
        ValueError: one sentence that names the field, its value and what is allowed.
    """

    token_budget: int
    """`L_max`: upper bound on a group's padded tokens (tokens)."""
    depth: int = 1024
    """`D`: samples that one rank holds observed and not yet emitted, at most (samples)."""
    alignment: str = "carry"
    """Rule for the steps of a round: `carry` (only full groups leave before the drain) or `max` (the paper's)."""
    split: str = "balanced"
    """How a rank with too few groups makes more: `balanced` (halve the most work) or `singleton` (the paper's)."""
    join: bool = True
    """True: every sample is emitted once per epoch. False: the epoch closes at `quota`, and counts what was left."""
    quota: float = 0.95
    """Without `join`: share of the data set after whose emission the epoch closes, within one step's samples."""
    overlong: str = "keep"
    """A sample longer than the budget: `keep` (a group of one), `drop` (counted and named) or `error`."""
    max_samples: int | None = None
    """Most samples in a group; None: no bound."""
    max_patches: int | None = None
    """Most visual patches in a group of several samples; None: no bound."""
    pad_to_multiple_of: int = 1
    """The collate function pads lengths to a multiple of this (tokens)."""
    dummy_tokens: int = 0
    """Tokens that the collate function adds to the first sample of a group without media (a dummy image)."""
    attention_length: int | None = None
    """Row length at which attention takes as long as all else in the model (tokens); None: attention counts nothing.

    Groups of different ranks meet in a step by padded tokens x (1 + row length / this); the budget is without it.
    """
    idle: str = "filler"
    """An IDLE slot: `filler` (a zero-weight micro-batch) or `skip` (batch None, for callers that use DDP Join)."""
    capacity: int | None = None
    """`C`: most groups that a rank emits in one round; None: `depth`, which bounds nothing."""
    max_wait: int = 8
    """A sample held back for this many rounds goes out with the next one.

    Unless `capacity`, the end of the data, or a window that dropped samples or `window_bytes` kept short forbids it.
    """
    ramp: bool = True
    """The first rounds of an epoch use D/8, D/4 and D/2, so that the first step comes quickly."""
    steps_multiple: int = 1
    """Fillers complete the epoch to a multiple of this number of steps (the gradient accumulation)."""
    assignment: str = "shared"
    """Which rank reads which index: `shared`, each what its window lacks; `static`, rank r reads `order[r::W]`."""
    window_bytes: int | None = None
    """Most bytes of samples that one rank holds in its window; None: a share of the host's available memory."""
    on_bad_sample: str = "raise"
    """A sample that cannot be read or used: `raise`, or `skip` (dropped, counted and named)."""
    max_bad_samples: int | None = 100
    """With `skip`: more of them in one epoch, over all ranks, end the run; None: no bound."""
    queue_steps: int = 4
    """Collated micro-batches that wait for the trainer, at most (steps)."""
    timeout: float = 1800.0
    """A rank that waits longer than this for another one, or for its own collate process, raises (seconds)."""
    shuffle: bool = True
    """Draw a new order of the data set each epoch; False: the order of the data set."""
    seed: int = 0
    """Seed of the order, of the draw of held-back groups and of the order of steps."""
    start_method: str = "fork"
    """How the collate process starts; `spawn` needs a data set and a collate function that pickle."""
    port: int = 0
    """TCP port of rank 0's machine where the collate processes meet; 0: any free one."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "depth", "max_wait", "steps_multiple", "queue_steps", "pad_to_multiple_of"):
            _positive_int(name, getattr(self, name))
        for name in ("max_samples", "max_patches", "capacity", "window_bytes", "attention_length"):
            if getattr(self, name) is not None:
                _positive_int(name, getattr(self, name))
        _int_from_zero("dummy_tokens", self.dummy_tokens)
        if self.max_bad_samples is not None:
            _int_from_zero("max_bad_samples", self.max_bad_samples)
        _int_from_zero("port", self.port)
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port!r}.")
        if isinstance(self.quota, bool) or not isinstance(self.quota, int | float) or not 0 < self.quota <= 1:
            raise ValueError(f"quota must be a share above 0 and at most 1, got {self.quota!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}.")
        for name in ("join", "ramp", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not 0 < self.timeout < inf:
            raise ValueError(f"timeout must be a number of seconds above 0, got {self.timeout!r}.")
        if self.token_budget < self.pad_to_multiple_of:
            raise ValueError(
                f"token_budget {self.token_budget} is smaller than pad_to_multiple_of {self.pad_to_multiple_of}, "
                "so no sample would fit; raise the budget."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> OdbConfig:
        """Build a config from a mapping; an unknown key raises ValueError and names the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown ODB option {', '.join(map(repr, unknown))}; known: {', '.join(known)}.")
        if "token_budget" not in values:
            raise ValueError("token_budget is missing; give the most padded tokens that a micro-batch may hold.")
        return cls(**values)

    @property
    def groups_per_round(self) -> int:
        """`C` as a number: most groups that a rank emits in one round."""
        return self.depth if self.capacity is None else self.capacity

    def window_target(self, round_index: int) -> int:
        """Samples that the window holds at the start of round `round_index` (0-based) of an epoch, at least 1."""
        divisor = 8 >> round_index if self.ramp and round_index < 3 else 1
        return max(1, self.depth // divisor)

    def fingerprint(self) -> int:
        """A 31-bit number of the version and the fields that matter, to notice ranks that would batch differently."""
        value = 0
        fields = {name: field for name, field in dataclasses.asdict(self).items() if name not in LOCAL_FIELDS}
        for char in repr((__version__, sorted(fields.items()))):
            value = (value * 1_000_003 + ord(char)) & 0x7FFFFFFF
        return value


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def _int_from_zero(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")
