"""Measures the loaders: speed alone, memory, and how long a trainer waits for them."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.rows import RowWriter

if TYPE_CHECKING:
    from benchmarks.loader.kinds import Material
    from benchmarks.loader.rank import Job, Seen
    from benchmarks.loader.watch import Peak

HELP = "the loader alone: samples/s, CPU, memory, first batch, and the wait behind a trainer"

DEADLINE = 240.0
"""Seconds that one epoch may take."""

BATCH_SIZE = 8
"""Of the plain loader: on average about as many padded tokens a batch as the budget."""

EVERYWHERE = ((1, 1), (1, 2), (2, 1), (2, 2))


@dataclass(frozen=True)
class Setup:
    """How a kind of samples is measured; a place is (ranks, workers of each)."""

    size: int
    """Samples of an epoch, over all ranks."""
    budget: int
    depth: int
    places: tuple[tuple[int, int], ...]
    memory_places: tuple[tuple[int, int], ...]
    wait_size: int = 0
    """Samples of an epoch behind a trainer; 0: not measured."""


SETUPS = {
    "text": Setup(4000, 16384, 256, EVERYWHERE, ((1, 2), (2, 2)), wait_size=2400),
    "pixels": Setup(320, 8192, 128, EVERYWHERE, ((1, 2), (2, 2)), wait_size=224),
    "pixels_bf16": Setup(320, 8192, 128, ((1, 2), (2, 1)), ((1, 2),)),
    "text_real": Setup(600, 16384, 256, ((1, 1), (1, 2), (2, 1)), ((1, 2),)),
    "images_real": Setup(256, 8192, 128, ((1, 1), (1, 2), (2, 1)), ((1, 2),)),
}
QUICK = {
    "text": Setup(1000, 16384, 256, ((1, 2), (2, 1)), (), wait_size=1000),
    "pixels": Setup(96, 8192, 64, ((1, 1),), ((1, 1),)),
}
WAIT_PLACE = (1, 2)
WAIT_REPETITIONS = 2
"""At most: an epoch behind a slow trainer takes long, and its share of waiting varies little."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=SETUPS, help="kinds of samples (default: all)")
    parser.add_argument("--methods", nargs="+", choices=("plain", "public", "odb"), default=["plain", "public", "odb"])
    parser.add_argument("--parts", nargs="+", choices=("speed", "memory", "wait"), default=["speed", "memory", "wait"])
    parser.add_argument("--repetitions", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--depth", type=int, help="window of OdbDataLoader (default: 256, with pixels 128)")
    parser.add_argument(
        "--load", type=float, nargs="+", help="trainer's time over the loader's, for the wait (default: 0.5 1 2 4)"
    )


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """Write a row for each epoch.

    Raises:
        BenchmarkError: a loader failed, or a plain or our own one repeated or lost a sample.
    """
    from benchmarks.loader.kinds import prepare
    from benchmarks.loader.methods import available

    methods = [method for method in options.methods if available(method)]
    for method in set(options.methods) - set(methods):
        print(f"{method}: the package online-dynamic-batching is not installed; its rows are left out.", flush=True)
    repetitions = options.repetitions or (1 if options.quick else 3)
    loads = options.load or ([1.0] if options.quick else [0.5, 1.0, 2.0, 4.0])
    setups = SETUPS | QUICK if options.quick else SETUPS
    for kind in options.kinds or (QUICK if options.quick else SETUPS):
        setup = setups[kind]
        if options.depth:
            setup = dataclasses.replace(setup, depth=options.depth)
        with tempfile.TemporaryDirectory(prefix="odb-loader-") as folder:
            material = prepare(kind, setup.size, options.seed, Path(folder))
            bench = _Bench(rows, setup, material, methods, options.seed)
            if "speed" in options.parts:
                bench.speed(repetitions)
            if "memory" in options.parts:
                bench.memory()
            if "wait" in options.parts and setup.wait_size:
                bench.wait(min(repetitions, WAIT_REPETITIONS), loads)


@dataclass(frozen=True)
class _Bench:
    """All measurements of one kind of samples."""

    rows: RowWriter
    setup: Setup
    material: Material
    methods: list[str]
    seed: int

    def speed(self, repetitions: int) -> None:
        """Each place and method `repetitions` times; the methods take turns."""
        for number in range(repetitions):
            for ranks, workers in self.setup.places:
                for method in self.methods:
                    seen = self._run(self._job(method, workers), ranks)
                    figures = speed_figures(seen) | self._coverage(method, seen)
                    self._add("speed", method, ranks, workers, figures, repetition=number)

    def memory(self) -> None:
        """Once, apart from what is timed: peaks vary little, and watching takes time."""
        from benchmarks.loader.watch import watched

        for ranks, workers in self.setup.memory_places:
            for method in self.methods:
                with tempfile.TemporaryDirectory(prefix="odb-watch-") as name, watched(Path(name), ranks) as peak:
                    self._run(dataclasses.replace(self._job(method, workers), watched=name), ranks)
                self._add("memory", method, ranks, workers, memory_figures(peak))

    def wait(self, repetitions: int, loads: list[float]) -> None:
        """Behind a trainer that takes a set time for each padded token, the same for all methods."""
        ranks, workers = WAIT_PLACE
        size = self.setup.wait_size
        part = dataclasses.replace(self.material, lengths=self.material.lengths[:size])
        bench = dataclasses.replace(self, material=part)
        (alone,) = bench._run(bench._job("plain", workers), ranks)
        per_token = (alone.ended - alone.first) / alone.tokens
        for number in range(repetitions):
            for load in loads:
                for method in self.methods:
                    seconds = load * per_token
                    job = dataclasses.replace(bench._job(method, workers), seconds_per_token=seconds)
                    seen = bench._run(job, ranks)
                    figures = wait_figures(seen, seconds) | bench._coverage(method, seen)
                    bench._add("wait", method, ranks, workers, figures, repetition=number, load=load)

    def _job(self, method: str, workers: int) -> Job:
        from benchmarks.loader.methods import Setting
        from benchmarks.loader.rank import Job

        setting = Setting(
            workers=workers,
            batch_size=BATCH_SIZE,
            budget=self.setup.budget,
            depth=self.setup.depth,
            seed=self.seed,
        )
        return Job(method=method, material=self.material, setting=setting)

    def _run(self, job: Job, ranks: int) -> list[Seen]:
        from benchmarks.loader.rank import run_epoch
        from tests.dist import RankFailure, run_ranks

        try:
            seen: list[Seen] = run_ranks(ranks, run_epoch, job, deadline=DEADLINE, init_group=ranks > 1)
        except RankFailure as error:
            raise BenchmarkError(f"{job.method} failed on {job.material.kind} samples:\n{error}") from None
        return seen

    def _coverage(self, method: str, seen: list[Seen]) -> dict[str, int]:
        found = coverage((index for rank in seen for index in rank.indices), len(self.material.lengths))
        if method != "public" and any(found.values()):
            raise BenchmarkError(f"{method} must deliver each {self.material.kind} sample exactly once: {found}.")
        return found

    def _add(self, what: str, method: str, ranks: int, workers: int, figures: dict[str, Any], **settings: Any) -> None:
        from benchmarks.loader.methods import PUBLIC_PREFETCH

        if method == "plain":
            settings["batch_size"] = BATCH_SIZE
        if method == "public":
            settings |= {"prefetch_factor": PUBLIC_PREFETCH, "data_set_with_pop": True}
        self.rows.add(
            what=what,
            data=self.material.kind,
            method=method,
            ranks=ranks,
            depth={"odb": self.setup.depth, "public": PUBLIC_PREFETCH * workers}.get(method),
            budget=None if method == "plain" else self.setup.budget,
            seed=self.seed,
            settings={"samples": len(self.material.lengths), "workers": workers, **settings},
            figures=figures,
        )
        print(f"  {what} {self.material.kind} {ranks}x{workers} {method}: {_in_words(figures)}", flush=True)


def coverage(indices: Iterable[int], size: int) -> dict[str, int]:
    """Samples that came more than once (each further time counts), and those that never came."""
    counts = Counter(indices)
    return {"repeated": counts.total() - len(counts), "missing": size - len(counts)}


def speed_figures(ranks: list[Seen]) -> dict[str, float]:
    """Of an epoch of all ranks. Rates count from the first batch on, but for `epoch_samples_per_s`."""
    began, ended = min(r.began for r in ranks), max(r.ended for r in ranks)
    first = min(r.first for r in ranks if r.batches)
    samples = sum(len(r.indices) for r in ranks)
    later = samples - sum(r.first_samples for r in ranks)
    padded, nbytes = sum(r.padded_tokens for r in ranks), sum(r.nbytes for r in ranks)
    return {
        "samples_per_s": later / (ended - first),
        "epoch_samples_per_s": samples / (ended - began),
        "mb_per_s": nbytes / 1e6 * later / samples / (ended - first),
        "cpu_ms_per_sample": 1000 * sum(r.cpu for r in ranks) / samples,
        "first_batch_s": max(r.first - r.began for r in ranks if r.batches),
        "epoch_s": ended - began,
        "batches": sum(r.batches for r in ranks),
        "fillers": sum(r.fillers for r in ranks),
        "padding": 1 - sum(r.tokens for r in ranks) / padded,
    }


def wait_figures(ranks: list[Seen], seconds_per_token: float) -> dict[str, float]:
    """Of one rank behind a trainer: shares of the wall time in which it waited."""
    (seen,) = ranks
    wall, before = seen.ended - seen.began, seen.first - seen.began
    return {
        "wait_share": (seen.waited - before) / (wall - before),
        "wait_share_with_start": seen.waited / wall,
        "first_batch_s": before,
        "epoch_s": wall,
        "trainer_s": seen.padded_tokens * seconds_per_token,
        "us_per_token": 1e6 * seconds_per_token,
        "samples_per_s": len(seen.indices) / wall,
    }


def memory_figures(peak: Peak) -> dict[str, float]:
    """Peaks over what there was before the loader, in 1e6 bytes."""
    return {
        "private_mb": peak.private / 1e6,
        "shared_mb": peak.shared / 1e6,
        "shared_mapped_mb": peak.mapped / 1e6,
        "shm_files_mb": peak.shm_files / 1e6,
        "processes": peak.processes,
        "looks": peak.looks,
    }


def _in_words(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
