"""One rank's side of the rounds of an epoch, without the communication.

A round is three calls, with one reduction over all ranks between each two (design.md, alignment): `begin_round` gives a
vector to be *min*-reduced, `plan` takes the minima and gives a vector to be *sum*-reduced, `close_round` takes the sums
and gives the steps to run. Where it says so (`ClosedRound.ask`), a prefix sum over ranks follows, which `assign` takes.
The runtime puts a Gloo group between the calls; tests put 128 simulated ranks there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from odb_factory.config import OdbConfig
from odb_factory.core.alignment import NONE, decode, encode, make_report, plan_round, target
from odb_factory.core.assignment import IndexSource, Wanted
from odb_factory.core.budget import Budget
from odb_factory.core.grouping import Group, group_window
from odb_factory.core.ordering import order_slots
from odb_factory.core.sample import SampleMeta
from odb_factory.core.seeding import generator
from odb_factory.core.stats import NO_TOTALS, StepTotals, totals_of

LEAST_AHEAD = 16
"""With shared assignment a rank holds the indices of its next window, and an eighth of `depth` or this many more."""


class ProtocolError(RuntimeError):
    """The ranks disagree, or another rank failed: this epoch cannot go on."""


class TooManyBadSamples(ProtocolError):
    """More samples were skipped as bad than `max_bad_samples` allows; raised on every rank in the same round."""


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
    ask: int | None
    """What this rank puts into the prefix sum that must follow, on every rank; None: none follows, on no rank."""


def make_budget(config: OdbConfig) -> Budget:
    """The bounds on one group that `config` describes."""
    return Budget(
        tokens=config.token_budget,
        pad_to_multiple_of=config.pad_to_multiple_of,
        dummy_tokens=config.dummy_tokens,
        max_samples=config.max_samples,
        max_patches=config.max_patches,
        attention_length=config.attention_length,
    )


class RankProtocol:
    """The window of one rank in one epoch, and its side of the alignment.

    Args:
        config: the same on all ranks.
        rank: this rank.
        epoch: the epoch, for the seeds.
        world_size: number of ranks; None: unknown, so that of what the others emit nothing is known either, and groups
            to be held back are drawn, not chosen.
        dataset_size: samples of the dataset, to notice ranks with different data, and for the quota.
        source: this rank's indices; None: they are someone else's business, and all assigned.
        emitted: samples that were emitted in this epoch before, in a run that is resumed.
        bad: samples that were skipped as bad then.
        state_check: a number of the state that is resumed, to notice ranks that resume another one.
    """

    TAIL: ClassVar[int] = 5
    """Numbers in the vector of `plan` after the totals of its steps."""

    def __init__(
        self,
        config: OdbConfig,
        *,
        rank: int,
        epoch: int,
        world_size: int | None,
        dataset_size: int = 0,
        source: IndexSource | None = None,
        emitted: int = 0,
        bad: int = 0,
        state_check: int = 0,
    ) -> None:
        self.config = config
        self.budget = make_budget(config)
        self.rank = rank
        self.epoch = epoch
        self.round_index = 0
        self.steps = 0
        self.emitted = emitted
        """Samples emitted in this epoch, on all ranks."""
        self.bad = bad
        """Samples skipped as bad in this epoch, on all ranks."""
        self._identity = (config.fingerprint(), dataset_size, state_check)
        self._quota = dataset_size if config.join else math.ceil(Fraction(str(config.quota)) * dataset_size)
        self._source = source
        self._world_size = world_size
        self._usual: tuple[int, ...] = ()
        self._pending = 0
        self._window: dict[int, SampleMeta] = {}
        self._waited: dict[int, int] = {}
        self._groups: list[Group] = []
        self._slots: list[Group | None] = []
        self._observed = (0, 0)
        self._wanted = (0, 0)
        self._run_samples = self._run_tokens = 0
        self._held_back: list[tuple[Group | None, StepTotals]] = []

    @property
    def window_size(self) -> int:
        """Samples held now."""
        return len(self._window)

    @property
    def window_bytes(self) -> int:
        """Bytes that they take."""
        return sum(s.nbytes for s in self._window.values())

    @property
    def all_assigned(self) -> bool:
        """Every index of the epoch belongs to some rank by now; the same on every rank."""
        return self._source is None or self._source.complete

    def start(self) -> list[int]:
        """The indices that this rank reads first, in order; once, before the first round."""
        indices = self._source.start() if self._source is not None else []
        self._pending = len(indices)
        return indices

    def assign(self, ask: int, before: int, total: int) -> list[int]:
        """The indices that this rank reads next.

        Args:
            ask: as the round said.
            before, total: the sum of that over the ranks before this one (`exclusive_sums`), and over all.
        """
        indices = self._source.assign(ask, before, total) if self._source is not None else []
        self._pending += len(indices)
        return indices

    def missing(self) -> int:
        """Samples to add before this round may begin (fewer only if the data ran out, or its bytes are too many)."""
        return max(0, self.config.window_target(self.round_index) - len(self._window))

    def add(self, samples: Iterable[SampleMeta]) -> None:
        """Put observed samples into the window."""
        for sample in samples:
            if sample.index in self._window:
                raise ProtocolError(f"rank {self.rank} observed sample {sample.index} twice in one window")
            self._window[sample.index] = sample
            self._observed = (self._observed[0] + 1, self._observed[1] + sample.length)
            self._pending -= 1

    def begin_round(self, *, exhausted: bool, failed: bool = False) -> tuple[int, ...]:
        """Group the window; returns the vector (17,) whose element-wise minimum over ranks `plan` takes.

        Args:
            exhausted: of this rank's indices, none is left to read.
            failed: this rank cannot go on; the others learn it from the same reduction.
        """
        self._groups = group_window(list(self._window.values()), self.budget)
        report = make_report(
            self._groups,
            self._waited,
            capacity=self.config.groups_per_round,
            max_wait=self.config.max_wait,
            exhausted=exhausted and self.all_assigned,
        )
        same = (*self._identity, self.epoch, self.round_index)
        return (*encode(report), self.rank if failed else NONE, *same, *(-value for value in same))

    def plan(self, minima: Sequence[int], *, dropped: int, unread: int, bad: int = 0) -> tuple[int, ...]:
        """Decide this rank's slots; returns the vector (5T + 5,) whose sum over ranks `close_round` takes.

        Args:
            minima: element-wise minimum of all ranks' `begin_round`.
            dropped: samples that this rank dropped since its last round, bad ones included.
            unread: a lower bound on the valid samples among this rank's indices that are not yet in the window, exact
                where it is 0.
            bad: how many of the dropped ones were bad.

        Raises:
            ProtocolError: another rank failed, or ranks differ in configuration, epoch or round.
        """
        self._check(minima[6:])
        view = decode(minima[:6])
        ramping = self.config.window_target(self.round_index) < self.config.depth
        steps = target(view, self.config.alignment, ramping=ramping)
        rng = generator(self.config.seed, "draw", self.epoch, self.round_index, self.rank)
        plan = plan_round(
            self._groups,
            self._waited,
            steps,
            self.budget,
            split=self.config.split,
            max_wait=self.config.max_wait,
            rng=rng,
            usual=() if view.draining or self.config.alignment == "max" else self._usual,
        )
        self._slots = order_slots(plan.slots, seed=self.config.seed, epoch=self.epoch, round_index=self.round_index)
        self._window = {s.index: s for s in plan.kept}
        self._waited = {s.index: self._waited.get(s.index, 0) + 1 for s in plan.kept}
        self._pending -= dropped
        self._wanted = self._want()
        per_step = [value for slot in self._slots for value in totals_of(slot)]
        return (*per_step, len(plan.kept) + unread, dropped, bad, *self._wanted)

    def _want(self) -> tuple[int, int]:
        """Samples that the next window lacks, and tokens that this rank holds or will have read."""
        if self._source is None or self._source.complete:
            return 0, 0
        goal = self.config.window_target(self.round_index + 1) + 1  # one more tells whether the data goes on
        ahead = max(LEAST_AHEAD, self.config.depth // 8)
        if self._source.lasts_for(2 * (self.config.depth + ahead)):
            # Keeps the workers busy during the exchange. How many must not depend on the number of workers, or that
            # would change the groups; and not near the end, where what a rank holds can no longer be evened out.
            goal += ahead
        count, tokens = self._observed
        load = sum(s.length for s in self._window.values()) + self._pending * tokens // max(1, count)
        return max(0, goal - len(self._window) - self._pending), load

    def close_round(self, sums: Sequence[int]) -> ClosedRound:
        """The steps of this round, with totals over all ranks; fillers complete the last accumulation window.

        Raises:
            TooManyBadSamples: on all ranks, since it shows in the sums.
            ProtocolError: `plan` was told of samples that do not exist; on all ranks too.
        """
        *per_step, remaining, dropped, bad, wanted, load = sums
        self._count_bad(bad)
        width = StepTotals.WIDTH
        totals = [StepTotals(*per_step[i : i + width]) for i in range(0, len(per_step), width)]
        if self._world_size is not None:
            self._usual = tuple(sorted((t.work // self._world_size for t in totals), reverse=True))
        cut = self._cut_at_quota(totals)
        over = cut or (remaining == 0 and self.all_assigned)
        slots = [*self._held_back, *zip(self._slots[: len(totals)], totals, strict=True)]
        self._held_back = []
        if self._is_stuck(totals, over, remaining, wanted) or (over and self.steps and not slots):
            raise ProtocolError(
                f"round {self.round_index} of epoch {self.epoch} has no step though samples were announced; this is a "
                "bug in the reading of samples."
            )
        if over and self.steps + len(slots):
            missing = -(self.steps + len(slots)) % self.config.steps_multiple
            slots += [(None, NO_TOTALS)] * missing
        elif remaining == 0 and slots:
            # What is left to read may all be dropped: whether this step is the last one shows after the next round.
            self._held_back = [slots.pop()]
        steps = tuple(
            PlannedStep(group, total, last=over and i == len(slots) - 1) for i, (group, total) in enumerate(slots)
        )
        self.steps += len(steps)
        self.round_index += 1
        return ClosedRound(steps, dropped, over, self._ask(wanted, load) if wanted and not over else None)

    def _ask(self, wanted: int, load: int) -> int | None:
        if self._source is None:
            return None
        mean = self._run_tokens / self._run_samples if self._run_samples else 1.0
        own, own_load = self._wanted
        return self._source.ask(Wanted(own=own, by_all=wanted, load=own_load, load_of_all=load, mean_length=mean))

    def _cut_at_quota(self, totals: list[StepTotals]) -> bool:
        """Count the emitted samples; without join, drop the steps after the one that reaches the quota (G3)."""
        for number, step in enumerate(totals):
            self.emitted += step.samples
            self._run_samples += step.samples
            self._run_tokens += step.tokens
            if not self.config.join and self.emitted >= self._quota:
                del totals[number + 1 :]
                return True
        return False

    def _is_stuck(self, totals: list[StepTotals], over: bool, remaining: int, wanted: int) -> bool:
        return not totals and not over and (remaining > 0 or wanted == 0)

    def _count_bad(self, bad: int) -> None:
        self.bad += bad
        limit = self.config.max_bad_samples
        if limit is not None and self.bad > limit:
            raise TooManyBadSamples(
                f"{self.bad} samples of epoch {self.epoch} were skipped as bad, more than max_bad_samples "
                f"(odb_max_bad_samples) {limit} allows; fix the data, or raise that number."
            )

    def _check(self, tail: Sequence[int]) -> None:
        failed, *same = tail
        if failed != NONE:
            raise ProtocolError(f"rank {failed} failed while it prepared data; its own error says why.")
        names = ("configuration", "size of the dataset", "resumed state", "epoch", "round")
        low, high = same[: len(names)], [-value for value in same[len(names) :]]
        for what, a, b in zip(names, low, high, strict=True):
            if a != b:
                raise ProtocolError(
                    f"the ranks differ in their {what} ({a} and {b}): start every rank with the same recipe, data, "
                    "checkpoint and package version, and iterate the loader the same number of times on each."
                )
