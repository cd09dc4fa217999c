"""The one configuration object of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from odb_factory.option import AUTO, check_options, integer, number, option, switch
from odb_factory.version import __version__

LOCAL_FIELDS = ("timeout", "queue_steps", "start_method", "window_bytes", "port")
"""Fields that may differ between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """What Online Dynamic Batching needs to know; the same on every rank.

    Each option says what it means to a user of a recipe, where its name begins with `odb_`; a text below a field adds
    what only the code needs.

    Raises:
        ValueError: one sentence that names the field, its value and what is allowed.
    """

    token_budget: int = field(
        metadata=option(
            "Most padded tokens in a micro-batch; `auto`: the most that fits into memory, found before training "
            "(this takes minutes, and on small data may give more than the windows can fill: compare with "
            "`odb-factory plan`). The default is the worst case that the fixed-batch recipe already fits.",
            integer(1),
            recipe_default=None,
            auto=True,
            unset="`per_device_train_batch_size` x `cutoff_len`",
        )
    )
    """`L_max`: bounds a group of several samples; `overlong` says what happens to a single one above it."""
    depth: int = field(
        default=1024,
        metadata=option(
            "Samples that a rank holds ready to choose from. More: less padding, more host memory.", integer(1)
        ),
    )
    """`D`: samples that one rank holds observed and not yet emitted, at most."""
    window_bytes: int | None = field(
        default=None,
        metadata=option(
            "Most bytes of samples that a rank holds ready.",
            integer(1, optional=True),
            unset="a share of the host's available memory",
        ),
    )
    max_samples: int | None = field(
        default=None, metadata=option("Most samples in a micro-batch.", integer(1, optional=True), unset="no bound")
    )
    max_patches: int | None = field(
        default=None,
        metadata=option(
            "Most visual patches in a micro-batch of several samples.", integer(1, optional=True), unset="no bound"
        ),
    )
    overlong: str = field(
        default="keep",
        metadata=option(
            "A sample above the budget: `keep` (alone, counted), `drop` (counted and named) or `error`.",
            choices=("keep", "drop", "error"),
        ),
    )
    on_bad_sample: str = field(
        default="raise",
        metadata=option(
            "A sample that cannot be read or used (corrupt media, wrong placeholders, no supervised token): `raise` "
            "ends the run, `skip` drops it (counted and named).",
            choices=("raise", "skip"),
        ),
    )
    max_bad_samples: int | None = field(
        default=100,
        metadata=option(
            "With `odb_on_bad_sample: skip`, more bad samples in an epoch, over all ranks, end the run; `null`: no "
            "bound.",
            integer(0, optional=True),
        ),
    )
    join: bool = field(
        default=True,
        metadata=option(
            "`true`: every sample is trained on once an epoch. `false`: the epoch ends when `odb_quota` of its "
            "samples are trained on; the rest is counted.",
            switch,
        ),
    )
    quota: float = field(
        default=0.95,
        metadata=option(
            "Share of an epoch's samples after which it ends, with `odb_join: false`.",
            number("a share above 0 and at most 1", lambda value: 0 < value <= 1),
        ),
    )
    """The epoch closes within one step's samples of it (G3)."""
    alignment: str = field(
        default="carry",
        metadata=option(
            "How the ranks agree on the steps of a round. `carry`: before the end of the epoch only full groups "
            "leave; `max`: the paper's rule.",
            choices=("carry", "max"),
        ),
    )
    split: str = field(
        default="balanced",
        metadata=option(
            "How a rank with too few groups makes more: `balanced` (halves the most work), or the paper's `singleton`.",
            choices=("balanced", "singleton"),
        ),
    )
    assignment: str = field(
        default="shared",
        metadata=option(
            "Which rank reads which sample. `shared`: each rank reads what its window lacks; `static`: a fixed share "
            "of the samples.",
            choices=("shared", "static"),
        ),
    )
    """With `static`, rank r of W reads `order[r::W]`."""
    attention_length: int | None = field(
        default=None,
        metadata=option(
            "Row length (tokens) at which attention takes as long as all else in the model. The micro-batches of a "
            "step are evened out over the ranks by padded tokens x (1 + row length / this); the budget is without "
            "it. `auto`: estimated from the model's configuration (Qwen3-VL-2B 15,001, 8B 25,662; with frozen "
            "weights, as LoRA has, about three quarters); `null`: attention counts nothing.",
            integer(1, optional=True),
            recipe_default=AUTO,
            auto=True,
        ),
    )
    idle: str = field(
        default="filler",
        metadata=option(
            "What a rank without a group runs: `filler`, a micro-batch of weight zero; `skip` works on one rank only.",
            choices=("filler", "skip"),
        ),
    )
    """`skip` hands out a batch of None, for training loops with DDP Join."""
    max_wait: int = field(default=8, metadata=option("Rounds for which `carry` may hold a sample back.", integer(1)))
    """A sample held back for this many rounds goes out with the next one, unless `capacity`, the end of the data, or a
    window that dropped samples or `window_bytes` kept short forbids it."""
    capacity: int | None = field(
        default=None,
        metadata=option("Most groups that a rank emits in a round.", integer(1, optional=True), unset="no bound"),
    )
    """`C`; None: `depth`, which bounds nothing."""
    queue_steps: int = field(
        default=4, metadata=option("Most finished micro-batches that wait for the trainer.", integer(1))
    )
    ramp: bool = field(
        default=True,
        metadata=option("Begin an epoch with smaller windows, so that the first step comes quickly.", switch),
    )
    """The first rounds use D/8, D/4 and D/2."""
    timeout: float = field(
        default=1800.0,
        metadata=option(
            "Seconds that a rank waits for another one, or for its own data, before it raises.",
            number("a number of seconds above 0", lambda value: 0 < value < inf),
        ),
    )
    port: int = field(
        default=0,
        metadata=option(
            "TCP port of rank 0's machine where the collate processes meet; 0: any free one.",
            integer(0, most=65535),
        ),
    )
    pad_to_multiple_of: int = field(
        default=1,
        metadata=option(
            "The collate function pads lengths to a multiple of this (tokens).", integer(1), in_recipe=False
        ),
    )
    dummy_tokens: int = field(
        default=0,
        metadata=option(
            "Tokens that the collate function adds to the first sample of a group without media (a dummy image).",
            integer(0),
            in_recipe=False,
        ),
    )
    steps_multiple: int = field(
        default=1,
        metadata=option(
            "Fillers complete the epoch to a multiple of this number of steps (the gradient accumulation).",
            integer(1),
            in_recipe=False,
        ),
    )
    shuffle: bool = field(
        default=True,
        metadata=option(
            "Draw a new order of the dataset each epoch; false: the order of the dataset.", switch, in_recipe=False
        ),
    )
    seed: int = field(
        default=0,
        metadata=option(
            "Seed of the order, of the draw of held-back groups and of the order of steps.",
            integer(),
            in_recipe=False,
        ),
    )
    start_method: str = field(
        default="fork",
        metadata=option(
            "How the collate process starts; `spawn` needs a dataset and a collate function that pickle.",
            choices=("fork", "spawn"),
            in_recipe=False,
        ),
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_budget(self.token_budget, self.pad_to_multiple_of)

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


def check_budget(budget: int, pad_to_multiple_of: int, name: str = "token_budget") -> None:
    """Raise ValueError for a budget into which nothing fits; `name` is how the user knows it."""
    if budget < pad_to_multiple_of:
        raise ValueError(
            f"{name} {budget} is smaller than pad_to_multiple_of {pad_to_multiple_of}, so no sample would fit; raise "
            "the budget."
        )
