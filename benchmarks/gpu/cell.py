"""One table of the benchmark: a profile of lengths as text or with images, trained on by every method."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.data import CONTENTS, Content, Ids, MadeSamples, Padded, lay_out
from benchmarks.gpu.feeds import Feed, Maker, has_public
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measuring import figures_of, run
from benchmarks.gpu.trainee import OutOfMemory
from benchmarks.lengths import PROFILES, draw
from benchmarks.rows import RowWriter

TINY_SCALE = 16
"""The tiny model's lengths and budgets are those of the full one divided by this."""

PEERS = ("packing", "public")
"""Methods whose failure does not end the run: they depend on others' code and kernels."""

SEARCH_SHARE = 0.6
"""Of a cell's time, after ODB's first run: no further batch size is tried later."""

LEAST_STEPS = 4
"""At the largest budget there are samples for so many steps at least."""

CALIBRATION = 256
"""Samples drawn to find out how fast the device is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, the same for every cell."""

    budgets: tuple[int, ...]
    """Padded tokens, ascending."""
    methods: tuple[str, ...]
    depth: int
    workers: int
    seconds: float
    """What a method at about the device's full speed should take."""
    masked: bool
    tiny: bool
    seed: int

    @property
    def limit_s(self) -> float:
        """A method that takes longer is stopped."""
        return 4 * self.seconds + 10

    def fixed_settings(self) -> dict[str, int | bool]:
        return {"workers": self.workers, "masked": self.masked, "tiny": self.tiny}

    @property
    def middle(self) -> int:
        """The budget that is measured first."""
        return self.budgets[len(self.budgets) // 2]


def in_order(budgets: Sequence[int], middle: int) -> list[tuple[str, int]]:
    """(method, budget) of all but Standard: what matters most comes first, since time may be up before the end."""
    others = [budget for budget in budgets if budget != middle]
    return [
        ("odb", middle),
        ("packing", middle),
        *(("odb", budget) for budget in others),
        ("public", middle),
        *(("packing", budget) for budget in others),
        *(("public", budget) for budget in others),
    ]


class Cell:
    """Measures one profile, in order of importance until time is up.

    Args:
        machine: what trains.
        plan: what is measured.
        profile: name of a profile of `lengths`.
        what: `text` or `image`.
        until: when no further method is begun (`time.monotonic`).
        rows: where rows go.

    Raises:
        BenchmarkError: the profile has no images, or nothing fits into the device.
    """

    def __init__(self, machine: Machine, plan: Plan, profile: str, what: str, until: float, rows: RowWriter) -> None:
        if what == "image" and not CONTENTS[profile].visual:
            raise BenchmarkError(f"samples of {profile} have no images; ask for {profile}:text.")
        self._machine = machine
        self._plan = plan
        self._profile = profile
        self._what = what
        self._until = until
        self._rows = rows
        self._scale = TINY_SCALE if plan.tiny else 1

    def measure(self) -> None:
        """Calibrates, looks for Standard's best batch size, and measures every method."""
        size = self._calibrated_size()
        maker = self._maker(size)
        self._say(f"{size} samples of {self._mean(maker):.0f} tokens in the mean")
        self._samples = maker.data.samples
        rest = list(self._others(maker))
        if rest and rest[0][0].startswith("odb"):  # never left out, however long the search below takes
            self._record(rest.pop(0)[1](), self._plan.limit_s)
        if "standard" in self._plan.methods:
            best, *second = self._best_batch_sizes(maker)
            self._record(maker.standard(best), self._plan.limit_s)
            rest += [(f"standard batch {other}", functools.partial(maker.standard, other)) for other in second]
        left_out = []
        for name, make in rest:
            if time.monotonic() + self._plan.seconds > self._until:
                left_out.append(name)
            else:
                self._record(make(), self._plan.limit_s)
        if left_out:
            self._say(f"left out, since time is up: {', '.join(left_out)}")

    def _others(self, maker: Maker) -> Iterator[tuple[str, Callable[[], Feed]]]:
        """Methods but for Standard, by importance: `in_order`."""
        makers = {"odb": maker.odb, "packing": maker.packing, "public": maker.public}
        usable = [name for name in makers if name in self._plan.methods and self._is_there(name)]
        for name, budget in in_order(self._plan.budgets, self._plan.middle):
            if name in usable:
                yield f"{name} {budget}", functools.partial(makers[name], budget)

    def _is_there(self, name: str) -> bool:
        if name == "packing" and not self._machine.can_pack:
            self._say("packing is left out: no attention kernel for padding-free rows works here")
            return False
        if name == "public" and not has_public():
            self._say("the public package is left out: online-dynamic-batching is not installed")
            return False
        return True

    def _best_batch_sizes(self, maker: Maker) -> list[int]:
        """The best batch size and the second best, out of 1, 2, 4, ..., each tried for a short time.

        It ends where memory does, or with the second size in a row that is no faster. The speed is that in real tokens:
        a short time may have met long samples or short ones.
        """
        rates: dict[int, float] = {}
        size, ends = 1, time.monotonic() + SEARCH_SHARE * (self._until - time.monotonic())
        while size <= len(self._samples):
            rate = self._record(maker.standard(size), max(0.5, self._plan.seconds / 3), trial=True)
            if rate is None:
                break
            rates[size] = rate
            if size >= 4 and max(rates[size], rates[size // 2]) < max(rates.values()):
                break
            size *= 2
            if time.monotonic() > ends:
                self._say(f"no time to try a batch size of {size}")
                break
        return sorted(rates, key=rates.__getitem__, reverse=True)[:2] or [1]

    def _record(self, feed: Feed, limit_s: float, trial: bool = False) -> float | None:
        """Measures one method and writes its row; its real tokens/s, or None where memory did not suffice."""
        trainee, plan = self._machine.trainee, self._plan
        trainee.empty()
        figures: dict[str, float | int | bool] = {}
        complete, problem = False, ""
        try:
            outcome = run(trainee, feed, min(limit_s, max(1.0, self._until + plan.seconds - time.monotonic())))
            complete = outcome.complete
            figures |= figures_of(outcome, self._samples, self._machine.work, self._machine.peak_flops)
        except OutOfMemory as error:
            problem = str(error)
        except Exception as error:
            if feed.method not in PEERS:
                raise
            self._say(f"{feed.method} {feed.budget} is left out, since it failed: {type(error).__name__}: {error}")
            return None
        if problem:  # not in the handler: there the error would keep the memory that is to be freed
            figures["out_of_memory"] = True
        figures |= trainee.peak_memory()
        self._rows.add(
            what=self._what,
            data=self._profile,
            method=feed.method,
            ranks=1,
            depth=feed.depth,
            budget=feed.budget,
            seed=plan.seed,
            settings=plan.fixed_settings()
            | self._machine.settings
            | feed.settings
            | {"samples": len(self._samples), "trial": trial, "complete": complete},
            figures=figures,
        )
        self._say(_line(feed, trial, figures, problem))
        if complete and not figures["unique_samples"] == figures["samples"] == len(self._samples):
            self._say(
                f"WRONG: {feed.method} trained on {figures['samples']} samples, of which "
                f"{figures['unique_samples']} different ones, out of {len(self._samples)}"
            )
        if not problem and not math.isfinite(figures["loss"]):
            self._say(f"WRONG: the loss of {feed.method} is {figures['loss']}")
        return None if problem else float(figures["tokens_per_s"])

    def _calibrated_size(self) -> int:
        """Samples that last for `plan.seconds` at the speed of full groups."""
        maker = self._maker(CALIBRATION)
        budgets = [budget for budget in self._plan.budgets if budget <= self._plan.middle]
        for budget in reversed(budgets):
            self._machine.trainee.empty()
            groups = list(maker.odb(budget).warm_up)
            try:
                seconds = self._machine.trainee.seconds_per_step(groups, 2 * len(groups))
            except OutOfMemory:
                continue
            tokens = sum(group["input_ids"].numel() for group in groups) / len(groups)
            mean = self._mean(maker)
            least = LEAST_STEPS * self._plan.budgets[-1] / mean
            return max(math.ceil(least), round(self._plan.seconds * tokens / seconds / mean))
        raise BenchmarkError(
            f"a micro-batch of {budgets[0]} tokens does not fit into this device; give a smaller --budgets."
        )

    def _maker(self, size: int) -> Maker:
        plan = self._plan
        content = CONTENTS[self._profile] if self._what == "image" else Content(visual=0.0, largest=1)
        lengths = [max(8, length // self._scale) for length in draw(self._profile, size, plan.seed)]
        data = MadeSamples(
            [lay_out(length, content) for length in lengths],
            Ids.of(self._machine.trainee.model.config),
            self._machine.trainee.model.dtype,
            plan.seed,
        )
        return Maker(
            data=data,
            padded=Padded(mask=plan.masked),
            longest=PROFILES[self._profile].longest // self._scale,
            workers=plan.workers,
            pin=self._machine.trainee.device.type == "cuda",
            depth=plan.depth,
            seed=plan.seed,
        )

    def _mean(self, maker: Maker) -> float:
        return sum(sample.length for sample in maker.data.samples) / len(maker.data)

    def _say(self, text: str) -> None:
        print(f"{self._profile} {self._what}: {text}", flush=True)


def _line(feed: Feed, trial: bool, figures: dict[str, float | int | bool], problem: str) -> str:
    size = feed.settings.get("batch_size")
    name = f"{feed.method} {'batch ' + str(size) if size else feed.budget}{' (trial)' if trial else ''}"
    if problem:
        return f"{name}: out of memory"
    mfu = f", MFU {figures['mfu']:.3f}" if "mfu" in figures else ""
    return (
        f"{name}: {figures['samples_per_s']:.4g} samples/s, {figures['tokens_per_s']:.4g} real tokens/s, "
        f"padding {figures['padding_share']:.1%}, wait {figures['wait_share']:.1%}{mfu}, {figures['seconds']:.1f} s"
    )
