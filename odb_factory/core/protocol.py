"""One rank's side of the rounds of an epoch, without the communication.

A round is three calls, with one reduction over all ranks between each two (DESIGN 3): `begin_round` gives a vector to
be *min*-reduced, `plan` takes the minima and gives a vector to be *sum*-reduced, `close_round` takes the sums and gives
the steps to run. The runtime puts a Gloo group between the calls; tests put 128 simulated ranks there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from odb_factory.config import OdbConfig
from odb_factory.core.alignment import NONE, GlobalView, decode, encode, make_report, plan_round, target
from odb_factory.core.budget import Budget
from odb_factory.core.grouping import Group, group_window
from odb_factory.core.ordering import order_slots
from odb_factory.core.sample import SampleMeta
from odb_factory.core.seeding import generator
from odb_factory.core.stats import StepTotals, totals_of


class ProtocolError(RuntimeError):
    """The ranks disagree, or another rank failed: this epoch cannot go on."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a rank."""

    group: Group | None
    """None: IDLE."""
    totals: StepTotals
    last: bool
    """The last step of the epoch, on every rank."""


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """What a round came to."""

    steps: tuple[PlannedStep, ...]
    """The steps to run, the same number on every rank."""
    dropped: int
    """Samples dropped on all ranks since the round before."""
    epoch_over: bool
    left: int
    """Samples that this rank has not emitted: a lower bound, 0 exactly when there are none."""


def make_budget(config: OdbConfig) -> Budget:
    """The bounds on one group that `config` describes."""
    return Budget(
        tokens=config.token_budget,
        pad_to_multiple_of=config.pad_to_multiple_of,
        dummy_tokens=config.dummy_tokens,
        max_samples=config.max_samples,
        max_patches=config.max_patches,
    )


class RankProtocol:
    """The window of one rank in one epoch, and its side of the alignment.

    Args:
        config: the same on all ranks.
        rank: this rank.
        epoch: the epoch, for the seeds.
        dataset_size: samples of the data set, to notice ranks with different data.
    """

    def __init__(self, config: OdbConfig, *, rank: int, epoch: int, dataset_size: int = 0) -> None:
        self.config = config
        self.dataset_size = dataset_size
        self.budget = make_budget(config)
        self.rank = rank
        self.epoch = epoch
        self.round_index = 0
        self.steps = 0
        self._window: dict[int, SampleMeta] = {}
        self._waited: dict[int, int] = {}
        self._groups: list[Group] = []
        self._slots: list[Group | None] = []
        self._left = 0

    @property
    def window_size(self) -> int:
        """Samples held now."""
        return len(self._window)

    def missing(self) -> int:
        """Samples to add before this round may begin (fewer only if the data ran out)."""
        return max(0, self.config.window_target(self.round_index) - len(self._window))

    def add(self, samples: Iterable[SampleMeta]) -> None:
        """Put observed samples into the window."""
        for sample in samples:
            if sample.index in self._window:
                raise ProtocolError(f"rank {self.rank} observed sample {sample.index} twice in one window")
            self._window[sample.index] = sample

    def begin_round(self, *, exhausted: bool, failed: bool = False) -> tuple[int, ...]:
        """Group the window; returns the vector (16,) whose element-wise minimum over ranks `plan` takes.

        Args:
            exhausted: no sample will come after those in the window.
            failed: this rank cannot go on; the others learn it from the same reduction.
        """
        self._groups = group_window(list(self._window.values()), self.budget)
        report = make_report(
            self._groups,
            self._waited,
            capacity=self.config.groups_per_round,
            max_wait=self.config.max_wait,
            exhausted=exhausted,
        )
        same = (self.config.fingerprint(), self.dataset_size, self.epoch, self.round_index)
        starved = exhausted and not self._window
        flags = (-int(starved), self.rank if failed else NONE)
        return (*encode(report), *flags, *same, *(-value for value in same))

    def plan(self, minima: Sequence[int], *, dropped: int, unread: int) -> tuple[int, ...]:
        """Decide this rank's slots; returns the vector (4T + 3,) whose sum over ranks `close_round` takes.

        Args:
            minima: element-wise minimum of all ranks' `begin_round`.
            dropped: samples that this rank dropped since its last round.
            unread: a lower bound on the valid samples not yet in the window, exact where it is 0.

        Raises:
            ProtocolError: another rank failed, or ranks differ in configuration, epoch or round.
        """
        self._check(minima[6:])
        view = decode(minima[:6])
        steps = self._target(view, some_rank_starved=minima[6] < 0)
        rng = generator(self.config.seed, "draw", self.epoch, self.round_index, self.rank)
        plan = plan_round(
            self._groups,
            self._waited,
            steps,
            self.budget,
            split=self.config.split,
            max_wait=self.config.max_wait,
            rng=rng,
        )
        self._slots = order_slots(plan.slots, seed=self.config.seed, epoch=self.epoch, round_index=self.round_index)
        self._window = {s.index: s for s in plan.kept}
        self._waited = {s.index: self._waited.get(s.index, 0) + 1 for s in plan.kept}
        remaining = len(plan.kept) + unread
        self._left = remaining
        per_step = [value for slot in self._slots for value in totals_of(slot)]
        return (*per_step, remaining, int(remaining == 0), dropped)

    def close_round(self, sums: Sequence[int]) -> ClosedRound:
        """The steps of this round, with totals over all ranks; fillers complete the last accumulation window.

        Raises:
            ProtocolError: `plan` was told of samples that do not exist; on all ranks, since it shows in the sums.
        """
        *per_step, remaining, finished_ranks, dropped = sums
        width = StepTotals.WIDTH
        totals = [StepTotals(*per_step[i : i + width]) for i in range(0, len(per_step), width)]
        slots = list(zip(self._slots, totals, strict=True))
        over = remaining == 0 or (not self.config.join and finished_ranks > 0)
        if not slots and (not over or self.steps):
            raise ProtocolError(
                f"round {self.round_index} of epoch {self.epoch} has no step though samples were announced; this is a "
                "bug in the reading of samples."
            )
        if over and self.steps + len(slots):
            missing = -(self.steps + len(slots)) % self.config.steps_multiple
            slots += [(None, StepTotals(0, 0, 0, 0))] * missing
        steps = tuple(
            PlannedStep(group, total, last=over and i == len(slots) - 1) for i, (group, total) in enumerate(slots)
        )
        self.steps += len(steps)
        self.round_index += 1
        return ClosedRound(steps, dropped, over, self._left)

    def _target(self, view: GlobalView, some_rank_starved: bool) -> int:
        if not self.config.join and some_rank_starved:
            return 0
        return target(view, self.config.alignment)

    def _check(self, tail: Sequence[int]) -> None:
        _, failed, *same = tail
        if failed != NONE:
            raise ProtocolError(f"rank {failed} failed while it prepared data; its own error says why.")
        names = ("configuration", "size of the data set", "epoch", "round")
        low, high = same[: len(names)], [-value for value in same[len(names) :]]
        for what, a, b in zip(names, low, high, strict=True):
            if a != b:
                raise ProtocolError(
                    f"the ranks differ in their {what} ({a} and {b}): start every rank with the same recipe, data and "
                    "package version, and iterate the loader the same number of times on each."
                )
