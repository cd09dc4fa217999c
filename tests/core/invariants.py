"""The guarantees of design.md as checks of a simulated epoch, with arithmetic of their own (not `Budget`'s).

Each raises AssertionError where its guarantee does not hold. Reusable by the model check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import ceil

from odb_factory.config import OdbConfig
from odb_factory.core.grouping import Group
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import Epoch, simulate


@dataclass(frozen=True)
class World:
    """What one epoch is run on."""

    config: OdbConfig
    samples: tuple[SampleMeta, ...]
    world_size: int
    dropped: frozenset[int] = field(default=frozenset())

    def run(self, *, exchange: bool = True, exact_unread: bool = True) -> Epoch:
        return simulate(
            self.samples,
            self.config,
            self.world_size,
            dropped=self.dropped,
            exchange=exchange,
            exact_unread=exact_unread,
        )

    @property
    def valid(self) -> list[int]:
        return [s.index for s in self.samples if s.index not in self.dropped]


def emitted(epoch: Epoch) -> list[int]:
    """Every index that some rank emitted, once per emission."""
    return [s.index for rank in epoch.steps for step in rank if step.group for s in step.group.samples]


def padded_rows(group: Group, config: OdbConfig) -> list[int]:
    """Row lengths of the micro-batch as the collate function makes it: the dummy goes to the first row."""
    rows = [s.length for s in group.samples]
    if not any(s.has_media for s in group.samples):
        rows[0] += config.dummy_tokens
    width = max(rows)
    while width % config.pad_to_multiple_of:
        width += 1
    return [width] * len(rows)


def work_of(rows: list[int], config: OdbConfig) -> int:
    """Their tokens, and what attention adds: as much again where rows are as long as `attention_length`."""
    if config.attention_length is None:
        return sum(rows)
    return sum(rows) + int(Fraction(sum(row * row for row in rows), config.attention_length))


def check_same_steps(epoch: Epoch) -> None:
    """G1: every rank runs the same number of steps, learns the same totals, and ends on the same, only, last step."""
    lengths = {len(rank) for rank in epoch.steps}
    assert len(lengths) == 1, f"steps per rank differ: {[len(rank) for rank in epoch.steps]}"
    assert len({len(rank) for rank in epoch.rounds}) == 1, "rounds per rank differ"
    for rank in epoch.steps:
        assert [step.totals for step in rank] == [step.totals for step in epoch.steps[0]], "ranks hold other totals"
        flags = [step.last for step in rank]
        assert flags == [False] * (len(flags) - 1) + [True] * bool(flags), f"last flags {flags}"


def check_each_once(epoch: Epoch, valid: Collection[int]) -> None:
    """G2: each valid index exactly once over all ranks."""
    assert Counter(emitted(epoch)) == Counter(valid)


def check_rounds(epoch: Epoch, valid: Collection[int]) -> None:
    """G4: a round with a sample in any window takes at least one out of it; so at most N such rounds."""
    busy = [column for column in zip(*epoch.rounds, strict=True) if any(done.window for done in column)]
    assert len(busy) <= len(valid), f"{len(busy)} rounds for {len(valid)} samples"
    for now, after in pairwise(zip(*epoch.rounds, strict=True)):
        held = sum(done.window for done in now)
        kept = sum(done.window - len(done.observed) for done in after)
        assert kept < held or not held, "a round took nothing out of the windows"


def check_within_bounds(epoch: Epoch, config: OdbConfig) -> None:
    """G6: no group of several samples exceeds any bound, no group is empty, and its cost is what it says."""
    for group in [step.group for rank in epoch.steps for step in rank if step.group]:
        rows = padded_rows(group, config)
        assert group.cost == sum(rows) > 0
        assert group.work == work_of(rows, config)
        if len(rows) > 1:
            assert sum(rows) <= config.token_budget, f"{rows} exceed {config.token_budget}"
            assert len(rows) <= (config.max_samples or len(rows))
            patches = sum(s.patches for s in group.samples)
            assert patches <= (config.max_patches or patches), f"{patches} patches"


def check_totals(epoch: Epoch, config: OdbConfig, samples: Sequence[SampleMeta]) -> None:
    """G7: the totals of each step are the sums over ranks."""
    for column in zip(*epoch.steps, strict=True):
        groups = [step.group for step in column if step.group]
        metas = [samples[s.index] for group in groups for s in group.samples]
        for step in column:
            assert step.totals.samples == len(metas)
            assert step.totals.loss_tokens == sum(s.loss_tokens for s in metas)
            assert step.totals.tokens == sum(s.length for s in metas)
            assert step.totals.padded_tokens == sum(sum(padded_rows(group, config)) for group in groups)
            assert step.totals.work == sum(work_of(padded_rows(group, config), config) for group in groups)


def tail_begins(epoch: Epoch, config: OdbConfig) -> int:
    """The first round in which windows may lack samples since the data end.

    A rank has run out of data, or (shared assignment) less is left than all windows could take, so that a rank with
    many tokens may get none.
    """
    last = config.assignment == "shared"
    room = len(epoch.rounds) * (config.depth + 1) if last else 0
    total = sum(len(done.observed) for rank in epoch.rounds for done in rank)
    for number, column in enumerate(zip(*epoch.rounds, strict=True)):
        if any(done.exhausted for done in column) or (last and total <= room):
            return number
        total -= sum(len(done.observed) for done in column)
    return len(epoch.rounds[0])


def check_wait(epoch: Epoch, config: OdbConfig) -> None:
    """Before the tail no sample waits for more than `max_wait` rounds."""
    max_wait = config.max_wait
    drain = tail_begins(epoch, config)
    for rank in epoch.rounds:
        since: dict[int, int] = {}
        for number, done in enumerate(rank[:drain]):
            since.update(dict.fromkeys(done.observed, number))
            for step in done.steps:
                for s in step.group.samples if step.group else ():
                    waited = number - since.pop(s.index)
                    assert waited <= max_wait, f"sample {s.index} waited for {waited} rounds"
        for index, start in since.items():
            assert drain - start <= max_wait, f"sample {index} waits since {drain - start} rounds at the drain"


def check_window(epoch: Epoch, config: OdbConfig, drops: bool) -> None:
    """A window never holds more than `depth` samples.

    It holds less than the ramp says only in the tail, or (shared assignment) where samples were dropped.
    """
    tail = tail_begins(epoch, config)
    for rank in epoch.rounds:
        for number, done in enumerate(rank):
            assert done.window <= config.depth
            short = done.exhausted or (config.assignment == "shared" and (drops or number >= tail))
            assert short or done.window >= config.window_target(number)


def check_paired(epoch: Epoch) -> None:
    """Pairing by work: in a round, no two steps are the one with more on one rank and with less on another."""
    for column in zip(*epoch.rounds, strict=True):
        by_step = zip(*(done.steps[done.carried :] for done in column), strict=True)
        work = sorted([step.group.work if step.group else 0 for step in steps] for steps in by_step)
        for of_rank in zip(*work, strict=True):
            assert list(of_rank) == sorted(of_rank), f"work {work} (sorted steps x ranks) are not paired"


def check_whole_steps(epoch: Epoch, config: OdbConfig) -> None:
    """The number of steps is a multiple of `steps_multiple`; steps without any sample only fill up the end."""
    totals = [step.totals.samples for step in epoch.steps[0]]
    assert len(totals) % config.steps_multiple == 0
    fillers = totals.count(0)
    assert fillers < config.steps_multiple
    assert not any(totals[len(totals) - fillers :]), f"a step without samples in the middle: {totals}"


def check_join(world: World, epoch: Epoch) -> None:
    """All that holds in join mode."""
    check_same_steps(epoch)
    check_each_once(epoch, world.valid)
    check_rounds(epoch, world.valid)
    check_within_bounds(epoch, world.config)
    check_totals(epoch, world.config, world.samples)
    check_window(epoch, world.config, bool(world.dropped))
    check_paired(epoch)
    check_whole_steps(epoch, world.config)
    for rank in epoch.rounds:
        assert sum(done.dropped for done in rank) == len(world.dropped)
    if world.config.capacity is None and (world.config.assignment == "static" or not world.dropped):
        check_wait(epoch, world.config)


def check_nonjoin(world: World, epoch: Epoch) -> None:
    """All that holds in non-join mode: it may end early, but together, and at the quota."""
    check_same_steps(epoch)
    check_within_bounds(epoch, world.config)
    check_totals(epoch, world.config, world.samples)
    check_window(epoch, world.config, bool(world.dropped))
    check_paired(epoch)
    check_whole_steps(epoch, world.config)
    check_quota(epoch, world)


def check_quota(epoch: Epoch, world: World) -> None:
    """G3: the epoch closes with the step that reaches the quota, or when nothing is left; no sample comes twice."""
    done = emitted(epoch)
    assert len(done) == len(set(done)), "a sample was emitted twice"
    assert set(done) <= set(world.valid)
    quota = ceil(round(world.config.quota * len(world.samples), 6))
    if len(world.valid) < quota:
        assert len(done) == len(world.valid), "the epoch was closed before the quota"
        return
    assert len(done) >= quota, f"{len(done)} samples where the quota is {quota}"
    last = next((step.totals.samples for step in reversed(epoch.steps[0]) if step.totals.samples), 0)
    assert len(done) - last < quota or not quota, "a step followed after the quota"
