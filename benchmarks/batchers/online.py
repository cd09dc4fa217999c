"""Online Dynamic Batching on simulated ranks that run the real core: ours, and the protocol of the paper."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.batchers.micro import filler
from benchmarks.epochs import Epoch, Micro
from odb_factory.config import OdbConfig
from odb_factory.core.budget import ceil_multiple
from odb_factory.core.grouping import Group
from odb_factory.core.sample import SampleMeta
from odb_factory.core.seeding import generator
from odb_factory.core.simulate import Epoch as Simulated
from odb_factory.core.simulate import simulate

PAPER = {"alignment": "max", "split": "singleton", "assignment": "static", "ramp": False}
"""The protocol of the paper, as far as `OdbConfig` has it; the pairing by length is `_paired_by_length`."""


@dataclass(frozen=True)
class Online:
    """An epoch of Online Dynamic Batching."""

    epoch: Epoch
    config: OdbConfig
    deferrals: tuple[int, ...]
    """Of each sample: rounds between the one in whose window it came, and the one that emitted it."""
    rounds: int
    cpu_s: float
    """CPU seconds of the core: grouping, alignment, ordering and index assignment of all ranks."""


def odb(
    lengths: Sequence[int],
    *,
    world: int,
    depth: int,
    budget: int,
    seed: int = 0,
    multiple: int = 8,
    **options: Any,
) -> Epoch:
    """Ours. `options` are further fields of `OdbConfig`."""
    return run_online(lengths, odb_config(depth, budget, seed, multiple, **options), world).epoch


def paper(lengths: Sequence[int], *, world: int, depth: int, budget: int, seed: int = 0, multiple: int = 8) -> Epoch:
    """The paper's protocol, run by our core.

    Static assignment; every rank makes as many groups as the one with the most, by taking single samples out of its
    largest group; step k has each rank's k-th group by length, in an order that all ranks draw alike.
    """
    return run_online(lengths, odb_config(depth, budget, seed, multiple, **PAPER), world, by_length=True).epoch


def odb_config(depth: int, budget: int, seed: int, multiple: int, **options: Any) -> OdbConfig:
    return OdbConfig(token_budget=budget, depth=depth, seed=seed, pad_to_multiple_of=multiple, **options)


def run_online(lengths: Sequence[int], config: OdbConfig, world: int, *, by_length: bool = False) -> Online:
    """One epoch.

    Args:
        by_length: after each round, pair the groups of the ranks by length instead of by work.
    """
    samples = [SampleMeta(index=i, length=length, loss_tokens=1) for i, length in enumerate(lengths)]
    start = time.process_time()
    simulated = simulate(samples, config, world)
    cpu_s = time.process_time() - start
    groups = _groups(simulated)
    if by_length:
        groups = [[_paired_by_length(round_, config, number) for number, round_ in enumerate(r)] for r in groups]
    shortest = _shortest_seen(simulated, lengths)
    ranks = [
        [_micro(group, config, least) for round_, least in zip(rounds, leasts, strict=True) for group in round_]
        for rounds, leasts in zip(groups, shortest, strict=True)
    ]
    epoch = Epoch(tuple(zip(*ranks, strict=True)), tuple(lengths))
    return Online(epoch, config, _deferrals(simulated, len(lengths)), len(groups[0]), cpu_s)


def _groups(simulated: Simulated) -> list[list[list[Group | None]]]:
    """[rank][round][step]"""
    return [[[step.group for step in done.steps] for done in rank] for rank in simulated.rounds]


def _paired_by_length(groups: list[Group | None], config: OdbConfig, round_index: int) -> list[Group | None]:
    """The same slots of a rank, by the length of their longest sample, then in an order that all ranks draw alike."""
    ranked = sorted(groups, key=lambda g: (0, 0) if g is None else (g.samples[-1].length, g.cost), reverse=True)
    generator(config.seed, "pairs", round_index).shuffle(ranked)
    return ranked


def _micro(group: Group | None, config: OdbConfig, shortest: int) -> Micro:
    if group is None:
        return filler(shortest, config.pad_to_multiple_of)
    width = ceil_multiple(group.samples[-1].length, config.pad_to_multiple_of)
    return Micro(tuple(s.index for s in group.samples), group.cost, group.cost * width)


def _shortest_seen(simulated: Simulated, lengths: Sequence[int]) -> list[list[int]]:
    """[rank][round]: the shortest sample that the rank has seen by then, of all where it has seen none."""
    result = []
    for rank in simulated.rounds:
        seen: list[int] = []
        least = max(lengths)
        for done in rank:
            least = min([least, *(lengths[i] for i in done.observed)])
            seen.append(least)
        result.append(seen)
    return result


def _deferrals(simulated: Simulated, size: int) -> tuple[int, ...]:
    came, left = [0] * size, [0] * size
    for rank in simulated.rounds:
        for number, done in enumerate(rank):
            for i in done.observed:
                came[i] = number
            for place, step in enumerate(done.steps):
                # a step that was held back to the next round was chosen in the round before
                chosen = number - (place < done.carried)
                for sample in step.group.samples if step.group else ():
                    left[sample.index] = chosen
    return tuple(b - a for a, b in zip(came, left, strict=True))
