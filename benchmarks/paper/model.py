"""The model behind the predictions: assumptions, epochs of made lengths, constants fitted to Standard, and rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.epochs import StepTime
from benchmarks.lengths import PROFILES, Profile, draw_of
from benchmarks.paper.cells import PAPER, PUBLIC, RATE, Cell, Setting, reference
from benchmarks.paper.fit import fit_all, fit_constant, only_standard
from benchmarks.paper.work import Work

OURS = "ours"
"""Method: this project's protocol. `odb` in a cell of the paper is the paper's protocol."""

BATCHERS = {"odb": "paper", OURS: "odb"}
"""Names of methods here -> in `benchmarks.batchers.METHODS`, where they differ."""

ATTENTION = 2e-5
"""Cost of a square over a token's by the 8B model's shape: causal attention in 36 layers of width 4096, against the
products of its 7.6e9 parameters."""

ATTENTION_LENGTH = 25662
"""What `odb_attention_length: auto` finds for the 8B model, of ours; 2B's squares cost as much of a token here."""

TIME_MODELS: dict[str, float | None] = {"A": None, "B": ATTENTION}
"""`Assumptions.square_ratio` of each: A fits all three constants; B takes attention from the shape and fits two."""

BUDGET = 12288
"""Assumed where the paper's best is not known (tokens)."""


@dataclass(frozen=True)
class Assumptions:
    """What is not published and must be assumed; the defaults are the tables', the rest is for the sensitivity."""

    depth: int = 1024
    batch_size: int = 1
    """Of Standard and Sorted (samples)."""
    most_samples: int = 250_000
    """Samples that are drawn of a data set, at most."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Data set -> factor on its profile's mean and longest sample."""
    longest: float = 1.0
    """Factor on the longest sample of all profiles; mean and CV stay."""
    budget: int = BUDGET
    """Where the paper's best is not known (tokens)."""
    small_model: float = 0.25
    """Cost of a token and of a square of the 2B model over the 8B model's: the ratio of their parameters."""
    square_ratio: float | None = None
    """Cost of a square over the cost of a token; None: fitted."""
    per_sample: float = 0.0
    """Share of one node's constant that is paid for every sample instead of every step; Standard cannot tell which.

    What a second node adds is exchanged once a step, whatever its batch.
    """

    def profile(self, dataset: str) -> Profile:
        """Before its mean is scaled."""
        known = PROFILES[dataset]
        return dataclasses.replace(known, longest=round(known.longest * self.longest))

    def budget_of(self, dataset: str) -> int:
        return int(reference()["datasets"][dataset].get("best_token_budget", self.budget))


class Works:
    """Epochs of batching made lengths, each made once."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._made: dict[tuple[object, ...], Work] = {}

    def of(self, dataset: str, ranks: int, method: str, assume: Assumptions) -> Work:
        return self.of_profile(assume.profile(dataset), dataset, ranks, method, assume, assume.budget_of(dataset))

    def of_profile(
        self, profile: Profile, name: str, ranks: int, method: str, assume: Assumptions, budget: int
    ) -> Work:
        """The work of an epoch of `profile`, scaled by what `assume` has for `name`."""
        from benchmarks.batchers import METHODS, Settings

        factor, size = assume.means.get(name, 1.0), min(profile.size, assume.most_samples)
        online = (budget, assume.depth) if method not in ("standard", "sorted") else ()
        key = (profile, factor, size, ranks, method, online or assume.batch_size, name)
        if key not in self._made:
            settings = Settings(
                world=ranks,
                budget=budget,
                depth=assume.depth,
                batch_size=assume.batch_size,
                cutoff=round(profile.longest * factor),
                seed=self._seed,
                attention_length=ATTENTION_LENGTH,
            )
            batcher = METHODS[BATCHERS.get(method, method)]
            self._made[key] = Work.of(batcher(self.lengths(profile, name, assume), settings))
        return self._made[key]

    def lengths(self, profile: Profile, name: str, assume: Assumptions) -> list[int]:
        """Of a data set of that profile (tokens); `name` and the seed decide the random numbers."""
        drawn = draw_of(profile, min(profile.size, assume.most_samples), (self._seed, *name.encode()))
        return [round(assume.means.get(name, 1.0) * length) for length in drawn]


class Model:
    """Rates of any method in any setting, from Standard's cells and assumptions alone.

    - 8B, one node: all constants from the three data sets' Standard on one node.
    - 2B: a token and a square cost `small_model` of that; the constant comes from Standard of MM-Mix: on one node and
      on two nodes of the public package from its records, on two nodes of the paper from its own cell.
    - 8B, two nodes: no cell of Standard is known. What two nodes add to 2B's constant is taken per parameter.

    Raises:
        ForbiddenFit: a cell is none of Standard's.
    """

    def __init__(self, standard: Sequence[Cell], works: Works, assume: Assumptions) -> None:
        only_standard(standard)
        self.assume = assume
        self._works = works
        large = [cell for cell in standard if _is(cell, "8B", 1, PAPER)]
        self.fits = {"8B, 1 node": fit_all([(c, self._standard(c)) for c in large], assume.square_ratio)}
        time = self.fits["8B, 1 node"].time
        share = assume.small_model
        for key, nodes, source in SMALL_FITS:
            cell = next(cell for cell in standard if _is(cell, "2B", nodes, source))
            work = self._standard(cell)
            self.fits[key] = fit_constant(
                cell, work, per_token=share * time.per_token, per_square=share * time.per_square
            )

    def _standard(self, cell: Cell) -> Work:
        return self._work(cell.settings[0], "standard")

    def _work(self, setting: Setting, method: str) -> Work:
        return self._works.of(setting.dataset, setting.ranks, method, self.assume)

    def time(self, setting: Setting) -> StepTime:
        """Constants of a setting."""
        if setting.model == "2B":
            return self.fits[_small_key(setting)].time
        time = self.fits["8B, 1 node"].time
        return time if setting.nodes == 1 else dataclasses.replace(time, constant=time.constant + self.second_node())

    def second_node(self) -> float:
        """Seconds that a second node adds to the 8B model's constant: 2B's, by parameters."""
        one, two = (self.fits[_small_key(Setting(dataset="mm_mix", model="2B", nodes=n))] for n in (1, 2))
        return max(0.0, two.time.constant - one.time.constant) / self.assume.small_model

    def rate(self, setting: Setting, method: str) -> float:
        """Emitted samples a second, all ranks."""
        time = self.time(setting)
        one_node = dataclasses.replace(setting, nodes=1)
        moved = self.assume.per_sample * min(time.constant, self.time(one_node).constant)
        # a step of Standard has `batch_size` samples on each rank, so that it takes the same time whatever is moved
        per_sample = moved / self.assume.batch_size
        return self._work(setting, method).rate(dataclasses.replace(time, constant=time.constant - moved), per_sample)

    def predict(self, cell: Cell, *, ours: bool = False) -> tuple[float, ...]:
        """The cell's quantity in each of its settings, by the paper's protocol or by ours."""
        method = OURS if ours and cell.method == "odb" else cell.method
        rates = [self.rate(setting, method) for setting in cell.settings]
        if cell.quantity == RATE:
            return tuple(rates)
        others = [self.rate(setting, cell.against) for setting in cell.settings]
        return tuple(rate / other for rate, other in zip(rates, others, strict=True))


SMALL_FITS = (
    ("2B, 1 node", 1, PUBLIC),
    ("2B, 2 nodes", 2, PAPER),
    ("2B, 2 nodes (public)", 2, PUBLIC),
)
"""Fit -> the one Standard cell that it rests on."""


def _small_key(setting: Setting) -> str:
    if setting.nodes == 1:
        return "2B, 1 node"
    return "2B, 2 nodes (public)" if setting.source == PUBLIC else "2B, 2 nodes"


def _is(cell: Cell, model: str, nodes: int, source: str) -> bool:
    setting = cell.settings[0]
    return (setting.model, setting.nodes, setting.source) == (model, nodes, source)
