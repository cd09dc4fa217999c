"""`odb_token_budget: auto`: before training, find the largest token budget whose worst step fits into memory.

Steps on synthetic groups, forward and backward as training does them, are measured at several shapes. All ranks run the
same shapes in lock step and agree on each result by a reduction, so that the rank with the least memory decides for
all and every rank takes the same way through the search. What is not measured is counted: optimizer states that only
the first update will make, and micro-batches of an update that wait on the device.

Running out of memory. A step is run only if what it will need, extrapolated from the smaller ones before it, is within
the memory there is. Should one run out of it all the same, then without sharding (DDP, one device) it counts as too
large and the search goes on: these steps do not synchronise gradients, so no rank waits for another one in them. With
DeepSpeed and FSDP a rank that stops in the middle of a backward leaves the others in a collective, and the engine with
half of a reduction that cannot be undone: the run then ends with an error that names the largest budget measured. The
other ranks end with it, as the launcher sees to, or at the latest after `ddp_timeout`.

Not seen are the optimizer's step itself, whose temporary memory does not depend on the budget and comes when no
activations are there, and fragmentation by shapes that follow each other: that is what the headroom is for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isinf, lcm
from typing import Any

import torch
import torch.distributed as dist

from odb_factory.core.budget import ceil_multiple
from odb_factory.core.budget_search import Found, Probe, search_budget
from odb_factory.core.group_shapes import Bounds, GroupShape, group_shapes
from odb_factory.runtime.errors import OdbError, other_rank
from odb_factory.runtime.memory import local_ranks, size_in_words
from odb_factory.runtime.tensors import map_tensors
from odb_factory.trainer.memory_probe import MemoryMeter, make_meter
from odb_factory.trainer.no_trace import forget_gradients, no_trace
from odb_factory.trainer.optimizer_memory import optimizer_tensors, pending_state_bytes
from odb_factory.trainer.options import AutoBudget
from odb_factory.trainer.out_of_memory import is_out_of_memory
from odb_factory.trainer.updates import to_device

HIGHEST = 2**20
"""No budget above this is looked for (tokens)."""

UNIT = 64
"""A budget found is a multiple of this, and of what batches are padded to (tokens)."""

TELL_SECONDS = 15.0
"""How often the search says how far it is."""

_ENDLESS = 2**62


@dataclass(frozen=True, kw_only=True)
class BudgetReport:
    """How the token budget of a run was found; the same on every rank, but for `seconds` and `pending`."""

    token_budget: int
    capacity: int
    """Bytes that the rank with the least memory may hold."""
    headroom: float
    """Share of them that is left free."""
    need: int
    """Bytes that the worst step needs with this budget, on that rank."""
    kind: str
    """The shape of that step."""
    pending: int
    """Part of `need` that is not measured: states that the optimizer will make with its first step (bytes)."""
    seconds: float
    probes: tuple[Probe, ...]

    @property
    def recipe_line(self) -> str:
        """What can be put into a recipe."""
        steps = len({(p.kind, p.padded_tokens) for p in self.probes if not p.foreseen})
        return (
            f"odb_token_budget: {self.token_budget}  # found by auto: the worst step needs {size_in_words(self.need)} "
            f"of {size_in_words(self.capacity)}, {steps} steps in {self.seconds:.0f} s"
        )

    def summary(self) -> dict[str, Any]:
        """For `odb_summary.json`: bytes, the shape of the worst step, seconds."""
        return {
            "memory": self.capacity,
            "headroom": self.headroom,
            "needed": self.need,
            "worst_shape": self.kind,
            "seconds": round(self.seconds, 1),
        }


class NoBudgetError(OdbError, ValueError):
    """Not even the smallest budget fits."""


@dataclass(frozen=True)
class Run:
    """What the search needs of a Trainer whose model and optimizer are prepared."""

    model: Any
    optimizer: Any
    device: torch.device
    rank: int
    world_size: int
    step: Callable[[Any], Any]
    """Forward and backward of a batch on the device, as in training, within a micro-batch that closes no update."""
    sharded: bool
    """Steps cannot do without collectives."""
    accumulation: int
    """Micro-batches of an update; 2 where it varies."""
    tell: Callable[[str], None] = lambda text: None
    """Logs a sentence, on one rank."""
    counted: int = 0
    """Bytes that a step needs beside what is measured and the optimizer's states."""


def choose_budget(auto: AutoBudget, bounds: Bounds, run: Run, *, keep_overlong: bool) -> BudgetReport:
    """Search; every rank gets the same budget.

    Args:
        auto: see `AutoBudget`.
        bounds: what the run allows a sample and a group.
        run: the parts of the Trainer.
        keep_overlong: a sample above the budget is trained on alone, so no budget below the longest one bounds a step.

    Raises:
        NoBudgetError: not even the smallest budget fits.
        OdbError: a sharded step ran out of memory although that was not foreseen, or another rank failed.
        ValueError: the device's memory cannot be measured.
    """
    begun = time.monotonic()
    unit = lcm(UNIT, bounds.pad_to_multiple_of)
    lowest = bounds.widest if keep_overlong else bounds.narrowest
    with no_trace(run.model, run.device):
        prober = _Prober(auto, run)
        # what the first step of all allocates for good; with several micro-batches an update, also the gradients
        prober.measure(group_shapes(bounds.narrowest, bounds)[0])
        found = search_budget(
            prober.measure,
            lambda budget: group_shapes(budget, bounds),
            lowest=lowest,
            highest=min(HIGHEST, bounds.most_samples * bounds.widest),
            unit=unit,
            slack=prober.slack,
        )
    if not found.budget:
        raise NoBudgetError(_nothing_fits(found, prober, auto, ceil_multiple(lowest, unit), keep_overlong))
    worst = _worst(found)
    return BudgetReport(
        token_budget=found.budget,
        capacity=prober.capacity,
        headroom=auto.headroom,
        need=prober.allowed + int(worst.over),
        kind=worst.kind,
        pending=prober.pending,
        seconds=time.monotonic() - begun,
        probes=found.probes,
    )


class _Prober:
    """Measures steps, and agrees on each with the other ranks."""

    def __init__(self, auto: AutoBudget, run: Run) -> None:
        self._auto, self._run = auto, run
        self._fitted = 0
        self._tried, self._told = 0, time.monotonic()
        with self._together("its memory was looked at"):
            self._meter = _make_meter(auto, run)
            self.pending = pending_state_bytes(run.optimizer, run.device)
            self._own = self._meter.capacity
        self.capacity = -self._max(-self._own)
        self.slack = int(self.capacity * auto.headroom)
        self.allowed = self.capacity - self.slack

    def measure(self, shape: GroupShape) -> float:
        """Bytes by which a step of this shape is above what the rank with the least to spare may use."""
        with self._together(f"a batch of {shape.padded_tokens} padded tokens was made"):
            batch = self._auto.make_batch(shape)
        need = self._in_lock_step(batch, shape) if self._run.sharded else self._abreast(batch, shape)
        if self._run.accumulation == 1 or isinf(need):
            forget_gradients(self._run.model)
        allowed = self._own - int(self._own * self._auto.headroom)
        over = self._max(_ENDLESS if isinf(need) else int(need) - allowed)
        if over <= 0:
            self._fitted = max(self._fitted, shape.padded_tokens)
        self._tell(shape, over)
        return inf if over >= _ENDLESS else over

    def _tell(self, shape: GroupShape, over: float) -> None:
        """From time to time, how far the search is."""
        self._tried += 1
        if time.monotonic() < self._told + TELL_SECONDS:
            return
        self._told = time.monotonic()
        self._run.tell(
            f"Online Dynamic Batching: still looking, {self._tried} steps tried; the last one, of "
            f"{shape.padded_tokens:,} padded tokens, {'fits' if over <= 0 else 'does not fit'}; {self._fitted:,} fit."
        )

    def _abreast(self, batch: Any, shape: GroupShape) -> float:
        """A step without collectives."""
        with self._together(f"a step of {shape.padded_tokens} padded tokens was tried"):
            try:
                return self._step(batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                _let_go(error)
        return inf

    def _in_lock_step(self, batch: Any, shape: GroupShape) -> float:
        """A step in which the ranks wait for each other, so that one cannot tell the others of an error."""
        try:
            return self._step(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            lower = self._fitted // UNIT * UNIT
            remedy = f"set odb_token_budget: {lower}, which fitted, or less" if lower else "use a smaller model"
            raise OdbError(
                f"odb_token_budget: auto: rank {self._run.rank} ran out of memory in a step of {shape.padded_tokens} "
                f"padded tokens, which was foreseen to fit, and a sharded run cannot go on after that; {remedy}."
            ) from error

    def _step(self, batch: Any) -> int:
        """Bytes that this rank needs."""
        run = self._run
        waiting = 0

        def step() -> None:
            nonlocal waiting
            on_device = to_device(batch, run.device)
            waiting = (run.accumulation - 1) * _nbytes(on_device)
            run.step(on_device)

        peak = self._meter.peak(step)
        return peak + self.pending + waiting + run.counted

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """An error on one rank ends the search on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        failed = self._max(int(error is not None))
        if error is not None:
            raise error
        if failed:
            raise OdbError(
                f"odb_token_budget: auto ends on rank {self._run.rank}, since "
                f"{other_rank(self._run.rank, self._run.world_size)} failed when {what}."
            )

    def _max(self, value: int) -> int:
        if self._run.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._run.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor.item())


def _let_go(error: BaseException) -> None:
    """The frames of the error hold the activations of the step that failed."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _make_meter(auto: AutoBudget, run: Run) -> MemoryMeter:
    model = run.model
    held = [*model.parameters(), *model.buffers(), *optimizer_tensors(run.optimizer)]
    buckets = 0
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):  # as large as all gradients
        buckets = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return make_meter(run.device, held, buckets, auto.memory_limit, local_ranks(run.world_size))


def _nbytes(batch: Any) -> int:
    sizes: list[int] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    map_tensors(batch, add)
    return sum(sizes)


def _worst(found: Found) -> Probe:
    """The step that needs most at the budget found."""
    at = (probe for probe in found.probes if probe.budget == found.budget and not probe.foreseen)
    return max(at, key=lambda probe: probe.over)


def _nothing_fits(found: Found, prober: _Prober, auto: AutoBudget, lowest: int, keep_overlong: bool) -> str:
    need = "runs out of memory" if isinf(found.over) else f"needs about {size_in_words(prober.allowed + found.over)}"
    what = f"a sample of {auto.longest} tokens (cutoff_len)" if keep_overlong else f"a step of {lowest} padded tokens"
    remedies = "use LoRA, ZeRO-3 or a smaller model"
    if keep_overlong:
        remedies = f"lower cutoff_len, leave longer samples out with odb_overlong: drop, or {remedies}"
    if auto.media:
        remedies = f"lower image_max_pixels, {remedies}"
    return (
        f"odb_token_budget: auto: {what} {need}, but a rank may use {size_in_words(prober.allowed)} "
        f"({size_in_words(prober.capacity)} without odb_auto_headroom {auto.headroom:g}); {remedies}."
    )
