"""What a run does, in figures over all ranks: since the last log, and of the whole run.

Most of it is in the `StepInfo`s already, exact and the same on every rank. What only single ranks know (their waits,
windows and work) is summed when something is logged: two small reductions then, and none in a step.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from odb_factory.core.stats import padding_share
from odb_factory.runtime.messages import StepInfo

PREFIX = "odb/"
"""Begins the names of the figures in logs."""

_SUMMED = ("rank_seconds", "wait_seconds", "idle", "window_samples", "window_bytes", "align_seconds")
"""Quantities of single ranks, to be summed over ranks."""

Reduce = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From a rank's quantities and its work of each step to the sums and the maxima over ranks."""


def make_reduce(world_size: int, device: torch.device) -> Reduce:
    """The reductions over the default process group, with tensors on `device`."""

    def reduce(sums: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if world_size == 1:
            return sums, work
        # float32 is what every device can reduce; what is summed here are times and means, and work up to 2^24 tokens
        summed, slowest = (torch.tensor(v, dtype=torch.float32, device=device) for v in (sums, work))
        dist.all_reduce(summed)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return summed.cpu().double().numpy(), slowest.cpu().double().numpy()

    return reduce


@dataclass
class Meter:
    """Counts and times updates on one rank; every rank calls `figures` and `state` at the same time.

    Args:
        world_size: number of ranks.
        reduce: see `make_reduce`.
        clock: seconds.
    """

    world_size: int
    reduce: Reduce
    clock: Callable[[], float] = time.perf_counter
    run: dict[str, float] = field(default_factory=dict)
    """Quantities of the whole run, over all ranks, as far as they were logged."""
    last_wait: float = 0.0
    """Seconds for which this rank waited for the data of the last update."""
    last_seconds: float = 0.0
    """Seconds that the last update took, with that."""
    _known: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    _local: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    _work: list[int] = field(default_factory=list, repr=False)
    _mark: float | None = field(default=None, repr=False)
    """Until when time is counted; None: the run has not begun."""
    _wait: float = field(default=0.0, repr=False)

    def begin_update(self) -> None:
        """An update begins; with the first one, time counts."""
        self._mark, self._wait = self.clock() if self._mark is None else self._mark, 0.0

    def skip(self) -> None:
        """What happened since the last update was no training, for a loop in which it cannot be `paused`."""
        self._mark = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, saving and logging: no time of training."""
        self._count_time()
        yield
        self._mark = self.clock()

    def _count_time(self) -> float:
        now, mark = self.clock(), self._mark
        seconds = 0.0 if mark is None else now - mark
        self._mark = now
        _add(self._local, rank_seconds=seconds)
        return seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for data."""
        begun = self.clock()
        yield
        self._wait += self.clock() - begun

    def end_update(self, infos: Sequence[StepInfo]) -> None:
        """An update is done that was made of these steps."""
        self.last_seconds, self.last_wait = self._count_time(), self._wait
        _add(self._local, wait_seconds=self.last_wait)
        _add(self._known, updates=1)
        for info in infos:
            self._count(info)

    def _count(self, info: StepInfo) -> None:
        _add(
            self._known,
            steps=1,
            samples=info.global_samples,
            tokens=info.global_tokens,
            padded_tokens=info.global_padded_tokens,
            work=info.global_work,
        )
        self._work.append(info.work)
        self._local["idle"] += info.idle
        _add(
            self._local,
            window_samples=info.window_samples,
            window_bytes=info.window_bytes,
            align_seconds=info.align_seconds,
        )

    def figures(self) -> dict[str, float]:
        """The figures since this was last called, over all ranks."""
        since = self._reduced()
        self.run = _sum(self.run, since)
        self._known.clear()
        self._local.clear()
        self._work.clear()
        return figures_of(since)

    def state(self) -> dict[str, float]:
        """Quantities of the whole run until now, fit for JSON; `restore` takes them."""
        return _sum(self.run, self._reduced())

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where `state` was saved."""
        self.run = dict(state)

    def _reduced(self) -> dict[str, float]:
        sums = np.array([self._local[name] for name in _SUMMED], dtype=np.float64)
        sums, slowest = self.reduce(sums, np.array(self._work, dtype=np.float64))
        reduced: dict[str, float] = {**self._known, **dict(zip(_SUMMED, sums.tolist(), strict=True))}
        reduced["slots"] = self._known["steps"] * self.world_size
        reduced["slowest_work"] = float(slowest.sum()) * self.world_size
        reduced["seconds"] = reduced["rank_seconds"] / self.world_size
        return reduced


def _add(into: defaultdict[str, float], **values: float) -> None:
    for name, value in values.items():
        into[name] += value


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def figures_of(total: Mapping[str, float]) -> dict[str, float]:
    """The figures that quantities over all ranks come to.

    samples_per_second, tokens_per_second, padded_tokens_per_second: while training (evaluation and saving not counted).
    padding: share of the padded tokens. samples_per_step, samples_per_update: of all ranks together.
    data_wait: share of the time for which the ranks waited for data.
    filler_share: share of the micro-batches that were fillers.
    imbalance: share of the ranks' time that went into waiting for the slowest, by `padded_work`.
    window_samples, window_bytes: of a rank, when the rounds began from which the steps came; mean over steps.
    align_ms: of the exchanges of those rounds, with the wait for other ranks.
    """

    def per(what: str, base: str) -> float:
        return total.get(what, 0) / total[base] if total.get(base) else 0.0

    figures = {
        "samples_per_second": per("samples", "seconds"),
        "tokens_per_second": per("tokens", "seconds"),
        "padded_tokens_per_second": per("padded_tokens", "seconds"),
        "padding": padding_share(int(total.get("tokens", 0)), int(total.get("padded_tokens", 0))),
        "samples_per_step": per("samples", "steps"),
        "samples_per_update": per("samples", "updates"),
        "data_wait": per("wait_seconds", "rank_seconds"),
        "filler_share": per("idle", "slots"),
        "imbalance": 1.0 - per("work", "slowest_work") if total.get("slowest_work") else 0.0,
        "window_samples": per("window_samples", "slots"),
        "window_bytes": per("window_bytes", "slots"),
        "align_ms": 1000.0 * per("align_seconds", "slots"),
    }
    return {name: float(f"{value:.6g}") for name, value in figures.items()}  # as many digits as mean something
