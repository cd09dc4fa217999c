"""What each rank runs: loaders over data with bad samples, one after the other, and a record of what came of each.

All of them share one world a number of ranks, since importing LLaMA-Factory takes longer than all the loaders.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from odb_factory import OdbConfig, OdbDataLoader
from tests.bad_samples.kinds import CUTOFF, Kind, Rows, good_row, make_kinds, make_media

BAD_PLACE = 5
"""Index of the bad row among `RAISE_ROWS`; rank 1 of two reads it."""
RAISE_ROWS = 8
LATE_ROWS, LATE_BAD = 32, (25, 27, 29, 31)
"""Rows of the data set for the bound, and the bad ones of them: late, and all read by rank 1 of two."""
TIMEOUT = 30.0


@dataclass
class Outcome:
    """What a rank saw of one epoch."""

    error: str = ""
    """Type and text of the error; empty: the epoch came to its end."""
    steps: int = 0
    fillers: int = 0
    indices: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str, str, bool]] = field(default_factory=list)
    """(index, reason, detail, bad)"""
    global_dropped: int = 0
    seconds: float = 0.0


@dataclass
class World:
    """What one rank saw of all loaders."""

    kinds: list[Kind] = field(default_factory=list)
    media: dict[str, str] = field(default_factory=dict)
    raised: dict[str, Outcome] = field(default_factory=dict)
    """By kind: a data set with one bad row, `on_bad_sample: raise`."""
    skipped: dict[str, Outcome] = field(default_factory=dict)
    """By template: all kinds in one data set, `on_bad_sample: skip`."""
    starved: Outcome = field(default_factory=Outcome)
    """Static assignment, and every second row bad: of two ranks, one has nothing valid."""
    bounds: dict[int | None, Outcome] = field(default_factory=dict)
    """By `max_bad_samples`."""
    machine: dict[str, Outcome] = field(default_factory=dict)
    """By error: the machine runs out of something, `on_bad_sample: skip`."""


def skip_rows(template: str, kinds: list[Kind], media: dict[str, str]) -> tuple[Rows, dict[int, Kind]]:
    """Good rows with one row of each kind of a template between them; and the kinds by index."""
    rows, places = Rows(), {}
    for number, kind in enumerate(k for k in kinds if k.template == template):
        rows += [good_row(2 * number + i, _usable(media, template)) for i in range(1 + number % 2)]
        places[len(rows)] = kind
        rows.append(kind.row)
    return Rows([*rows, good_row(1000)]), places


def raise_rows(kind: Kind, media: dict[str, str]) -> Rows:
    """Good rows, and one of a kind at `BAD_PLACE`."""
    return _with_one(kind.row, _usable(media, kind.template))


def starving_rows(kinds: list[Kind], media: dict[str, str]) -> Rows:
    """Every second row is bad: all that rank 1 of two reads."""
    return Rows(r for i, k in enumerate(kinds) if k.template == "vl" for r in (good_row(i, media), k.row))


def _with_one(bad: dict[str, Any], media: dict[str, str] | None) -> Rows:
    return Rows(bad if i == BAD_PLACE else good_row(i, media) for i in range(RAISE_ROWS))


def _usable(media: dict[str, str], template: str) -> dict[str, str] | None:
    return media if template == "vl" else None


class Bench:
    """The parts of a run in this process, and the loaders over them."""

    def __init__(self, model: Path) -> None:
        from odb_factory.llamafactory.collator import OdbCollator, dummy_tokens
        from odb_factory.llamafactory.online_dataset import observe_online
        from tests.llamafactory.helpers import PAD_MULTIPLE, make_parts

        self.parts = {"vl": make_parts(model, "qwen3_vl_nothink", None, cutoff_len=CUTOFF)}
        self.parts["plain"] = make_parts(model, "empty", None, cutoff_len=CUTOFF)
        self._collate = {name: OdbCollator(parts.stock_collator(), None) for name, parts in self.parts.items()}
        self._dummy = {name: dummy_tokens(p.template, p.tokenizer, p.processor) for name, p in self.parts.items()}
        self._pad, self._observe = PAD_MULTIPLE, observe_online

    def run(self, template: str, rows: Rows, *, worker_init_fn: Any = None, **options: Any) -> Outcome:
        """One epoch over `rows`."""
        config = OdbConfig(
            token_budget=256,
            pad_to_multiple_of=self._pad,
            dummy_tokens=self._dummy[template],
            depth=4,
            ramp=False,
            shuffle=False,
            timeout=TIMEOUT,
            **options,
        )
        dataset, outcome, begun = self.parts[template].online(rows), Outcome(), time.monotonic()
        with OdbDataLoader(
            dataset,
            self._collate[template],
            config,
            num_workers=0 if worker_init_fn is None else 1,
            worker_init_fn=worker_init_fn,
            observe=self._observe,
        ) as loader:
            try:
                for batch, info in loader:
                    outcome.steps += 1
                    outcome.fillers += info.idle
                    outcome.indices += info.indices
                    outcome.global_dropped += info.global_dropped
                    _keep(outcome, info.dropped)
                    _check_batch(batch, info.indices, dataset)
                _keep(outcome, loader.epoch_ends[-1].dropped)
                outcome.global_dropped += loader.epoch_ends[-1].global_dropped
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = time.monotonic() - begun
        return outcome


def _keep(outcome: Outcome, dropped: Iterable[Any]) -> None:
    outcome.dropped += [(d.index, d.reason, d.detail, d.bad) for d in dropped]


def _check_batch(batch: Any, indices: tuple[int, ...], dataset: Any) -> None:
    """Each row of a batch is the sample that it is said to be: nothing stands in for another."""
    if not indices:
        return
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert len(ids) == len(indices)
    for position, index in enumerate(indices):
        wanted = dataset[index]["input_ids"]
        found = ids[position][mask[position] == 1].tolist()
        assert found[: len(wanted)] == wanted, f"row {position} is not sample {index}"  # a dummy image may follow


def _no_files_left(worker: int) -> None:
    """From now on this worker can open nothing.

    The limit lies below every file but the three standard ones. A limit at the lowest free number would not do: the
    worker may close a lower one that it got from its parent, whenever garbage is collected, and open that one again.
    It cannot be 0 either, since poll takes no more files than the limit.
    """
    while os.open(os.devnull, os.O_RDWR) < 2:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _failing_open(error: Exception) -> Callable[[int], None]:
    def patch(worker: int) -> None:
        from llamafactory.data import mm_plugin

        def fail(*args: Any) -> None:
            raise error

        mm_plugin.Image.open = fail

    return patch


def _machine_errors(media: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """By name: what a worker does first, and the row that then meets the error."""
    from tests.llamafactory.helpers import row

    image = row("<image>What is this?", "a picture", images=[media["small.png"]])
    film = row("<video>What is this?", "a film", videos=[media["small.mp4"]])
    return {
        "EMFILE, image": (_no_files_left, image),
        "EMFILE, video": (_no_files_left, film),
        "ENOSPC": (_failing_open(OSError(errno.ENOSPC, "No space left on device")), image),
        "MemoryError": (_failing_open(MemoryError("no memory")), image),
    }


def run_world(rank: int, ranks: int, model: Path, folder: Path) -> World:
    """All loaders, on one rank."""
    media = make_media(folder / str(rank)) if ranks == 1 else _shared_media(rank, folder)
    kinds = make_kinds(media)
    bench, world = Bench(model), World(kinds, media)
    for kind in kinds:
        world.raised[kind.name] = bench.run(kind.template, raise_rows(kind, media), assignment="static")
    for template in bench.parts:
        rows, _ = skip_rows(template, kinds, media)
        world.skipped[template] = bench.run(template, rows, on_bad_sample="skip")
    world.starved = bench.run("vl", starving_rows(kinds, media), on_bad_sample="skip", assignment="static")
    late = Rows(kinds[0].row if i in LATE_BAD else good_row(i, media) for i in range(LATE_ROWS))
    for bound in (2, len(LATE_BAD), None):
        skip = partial(bench.run, on_bad_sample="skip", assignment="static", max_bad_samples=bound)
        world.bounds[bound] = skip("vl", late)
    for name, (start, row) in _machine_errors(media).items():
        rows = _with_one(row, None)
        world.machine[name] = bench.run("vl", rows, worker_init_fn=start, on_bad_sample="skip", assignment="static")
    return world


def _shared_media(rank: int, folder: Path) -> dict[str, str]:
    import torch.distributed as dist

    if rank == 0:
        make_media(folder / "shared")
    dist.barrier()
    return {p.name: str(p) for p in (folder / "shared").iterdir()} | {"gone": str(folder / "shared" / "gone")}
