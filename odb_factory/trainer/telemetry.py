"""What a run does, in figures over all ranks: since the last log, and of the whole run.

Most of it is in the ledger already, exact and the same on every rank. What only single ranks know (their waits, windows
and work) is summed when something is logged: two small reductions then, and none in a step.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from odb_factory.core.stats import padding_share
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.ledger import Ledger

PREFIX = "odb/"
"""Begins the names of the figures in logs."""

_LOCAL = ("rank_seconds", "wait_seconds", "window_samples", "window_bytes", "align_seconds")
"""Quantities that single ranks measure."""

SUMMED = (*_LOCAL, "idle")
"""Quantities of single ranks, to be summed over ranks."""

MEASURED = (*SUMMED, "slowest_work", "seconds")
"""What is known of a run only when something is logged, over all ranks."""

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


class Meter:
    """Times updates on one rank, and makes figures of that and of the ledger.

    Every rank calls `figures` and `state` at the same time.

    Args:
        ledger: of the run; it knows of an update before `end_update` is called.
        reduce: see `make_reduce`.
        clock: seconds.
    """

    def __init__(self, ledger: Ledger, reduce: Reduce, clock: Callable[[], float] = time.perf_counter) -> None:
        self.run: dict[str, float] = {}
        """`MEASURED` of the whole run, as far as it was logged."""
        self.last_wait = 0.0
        """Seconds for which this rank waited for the data of the last update."""
        self.last_seconds = 0.0
        """Seconds that the last update took, with that."""
        self._ledger, self._reduce, self._clock = ledger, reduce, clock
        self._local: dict[str, float] = dict.fromkeys(_LOCAL, 0.0)
        self._work: list[int] = []
        """Of this rank, in each step since the last log."""
        self._mark: float | None = None
        """Until when time is counted; None: the run has not begun."""
        self._wait = 0.0
        self._untimed: Counter[str] = Counter()
        """Counts of a run whose beginning nobody measured."""
        self._count_from_here()

    def _count_from_here(self) -> None:
        self._counted, self._fillers = Counter(self._ledger.counts), self._ledger.local["fillers"]
        self._local = dict.fromkeys(_LOCAL, 0.0)
        self._work = []

    def begin_update(self) -> None:
        """An update begins; with the first one, time counts."""
        self._mark, self._wait = self._clock() if self._mark is None else self._mark, 0.0

    def skip(self) -> None:
        """What happened since the last update was no training, for a loop in which it cannot be `paused`."""
        self._mark = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, saving and logging: no time of training."""
        self._count_time()
        yield
        self._mark = self._clock()

    def _count_time(self) -> float:
        now, mark = self._clock(), self._mark
        seconds = 0.0 if mark is None else now - mark
        self._mark = now
        self._local["rank_seconds"] += seconds
        return seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for data."""
        begun = self._clock()
        yield
        self._wait += self._clock() - begun

    def end_update(self, infos: Sequence[StepInfo]) -> None:
        """An update is done that was made of these steps."""
        self.last_seconds, self.last_wait = self._count_time(), self._wait
        self._local["wait_seconds"] += self.last_wait
        for info in infos:
            self._work.append(info.work)
            self._local["window_samples"] += info.window_samples
            self._local["window_bytes"] += info.window_bytes
            self._local["align_seconds"] += info.align_seconds

    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """Of this rank since the last log: `SUMMED`, and its work in each step."""
        values = {**self._local, "idle": self._ledger.local["fillers"] - self._fillers}
        return np.array([values[name] for name in SUMMED], dtype=np.float64), np.array(self._work, dtype=np.float64)

    def figures(self) -> dict[str, float]:
        """The figures since this was last called, over all ranks."""
        measured = self._measured()
        figures = figures_of({**self._ledger.counts - self._counted, **measured})
        self.run = _sum(self.run, measured)
        self._count_from_here()
        return figures

    def figures_of_run(self) -> dict[str, float]:
        """Those of the whole run, as far as it was logged."""
        return figures_of({**self._ledger.counts - self._untimed, **self.run})

    def state(self) -> dict[str, float]:
        """`MEASURED` of the whole run until now, fit for JSON; `restore` takes it."""
        return _sum(self.run, self._measured())

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Go on where `state` was saved, after the ledger; None: it was not, so that what was before does not count."""
        if state is None:
            self._untimed = Counter(self._ledger.counts)
        else:
            self.run = {name: state.get(name, 0) for name in MEASURED}
        self._count_from_here()

    def _measured(self) -> dict[str, float]:
        sums, slowest = self._reduce(*self.own())
        measured: dict[str, float] = dict(zip(SUMMED, sums.tolist(), strict=True))
        measured["slowest_work"] = float(slowest.sum()) * self._ledger.world_size
        measured["seconds"] = measured["rank_seconds"] / self._ledger.world_size
        return measured


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other[name] for name in other}


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
