"""Starts trainings with cold and warm caches, and watches time, decodings, caches and memory."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.rows import RowWriter

HELP = "stock preprocessing against the online path: time to the first step, decodings, cache, memory"


@dataclass(frozen=True)
class Method:
    """A way to start a training."""

    name: str
    recipe: dict[str, Any]
    after: str | None = None
    """The method whose cache it finds; None: it finds none."""


METHODS = (
    Method("standard", {"preprocessing_num_workers": 1}),
    Method("standard 2 workers", {"preprocessing_num_workers": 2}),
    Method("standard cached", {"preprocessing_num_workers": 1}, after="standard"),
    Method("odb", {"odb": True}),
    Method("odb cached", {"odb": True}, after="odb"),
)
KINDS = {"text": "ShareGPT", "images": "drawn JPEGs"}
WHAT = {"text": "first step", "images": "epoch"}
"""What a training of a kind is: up to its first step, or a whole epoch."""

WATCHED = ("first_step_s", "wall_s", "cpu_s", "peak_rss_gib", "others_share")
"""Figures of `benchmarks.launch` that are kept."""


@dataclass(frozen=True)
class Size:
    """How much there is; None: all conversations."""

    conversations: int | None
    images: int
    methods: tuple[str, ...] = tuple(method.name for method in METHODS)


FULL = Size(conversations=None, images=400)
QUICK = Size(conversations=300, images=20, methods=("standard", "odb"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, help="so many (default: all usable ones)")
    parser.add_argument("--images", type=int, help=f"so many (default: {FULL.images})")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS), metavar="KIND")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/benchmarks/first_step"), help="emptied first")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that a training may take")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each start of a training.

    Raises:
        BenchmarkError: a training failed, or the decodings could not be counted.
    """
    from benchmarks.first_step import data
    from benchmarks.work_dir import fresh

    size = QUICK if options.quick else FULL
    conversations, images = options.conversations or size.conversations, options.images or size.images
    place = fresh(options.work_dir)
    for kind in options.kinds:
        print(f"Making model and data of {kind} ...", flush=True)
        if kind == "text":
            samples = data.make_text(place / kind, conversations, options.seed)
        else:
            samples = data.make_images(place / kind, images, options.seed)
        for repetition in range(options.repetitions):
            bench = Bench(place / kind, kind, samples, rows, options.seed, repetition, options.deadline)
            for method in METHODS:
                if method.name in size.methods:
                    bench.run(method)


@dataclass(frozen=True)
class Bench:
    """The trainings of a repetition with one of the data sets."""

    place: Path
    kind: str
    samples: int
    rows: RowWriter
    seed: int
    repetition: int
    deadline: float

    def run(self, method: Method) -> None:
        """Start a training and write its row."""
        from benchmarks.first_step.data import recipe
        from benchmarks.first_step.decodes import Counts, counting
        from benchmarks.launch import train

        name = f"{self.kind} {method.name} {self.repetition}"
        output = self.place / name.replace(" ", "_")
        values = recipe(self.kind, self.place, output, self.seed) | method.recipe
        output.with_suffix(".yaml").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        cache = self.place / f"cache_{(method.after or method.name).replace(' ', '_')}_{self.repetition}"
        found = folder_bytes(cache)
        if (found > 0) != (method.after is not None):
            raise BenchmarkError(f"the cache of {name} holds {found} bytes before its start.")
        print(f"Training: {name} ...", flush=True)
        images = self.kind == "images"
        with counting(output.with_suffix(".count")) if images else contextlib.nullcontext(Counts()) as counts:
            finished = train(
                output.with_suffix(".yaml"),
                name=name,
                ranks=1,
                output_dir=output,
                cache=cache,
                console=output.with_suffix(".log"),
                deadline=self.deadline,
            )
        figures = {name: getattr(finished, name) for name in WATCHED}
        figures["cache_mb"] = (folder_bytes(cache) - found) / 1e6
        if images:
            if counts.decoded < self.samples:
                raise BenchmarkError(
                    f"{name} decoded {counts.decoded} images where it has {self.samples}: the count missed some."
                )
            figures |= {
                "decodes_per_sample": counts.decoded / self.samples,
                "opens_per_sample": counts.opened / self.samples,
            }
        self._add(method, values, figures)

    def _add(self, method: Method, values: dict[str, Any], figures: dict[str, Any]) -> None:
        shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        print(f"  {shown}", flush=True)
        self.rows.add(
            what=WHAT[self.kind],
            data=KINDS[self.kind],
            method=method.name,
            ranks=1,
            budget=values["per_device_train_batch_size"] * values["cutoff_len"],
            seed=self.seed,
            settings={
                "samples": self.samples,
                "batch_size": values["per_device_train_batch_size"],
                "preprocessing_num_workers": values.get("preprocessing_num_workers"),
                "dataloader_num_workers": values["dataloader_num_workers"],
                "repetition": self.repetition,
            },
            figures=figures,
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
