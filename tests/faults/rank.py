"""One rank of a cell: trains with the real loader until the fault has ended it, and reports how."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime.rendezvous import serve_store
from tests.faults.cell import EPOCHS, SIZE, STEP, Cell
from tests.faults.inject import FaultyCollate, FaultyData, Injector, note_end
from tests.runtime.helpers import Epoch, Lengths, PadCollate, open_files, run_epoch


@dataclass
class Report:
    """How a rank ended."""

    error: str = ""
    """Class of the error; empty: there was none."""
    text: str = ""
    raised: float = 0.0
    """Time (monotonic) when it came out of the loop, and when the loader was closed."""
    ended: float = 0.0
    files: tuple[int, int] = (0, 0)
    """Open descriptors before the loader was made and after it was closed."""
    threads: tuple[int, int] = (0, 0)
    left: list[str] = field(default_factory=list)
    """What the surviving trainer process still holds: processes, ports."""
    after: list[Epoch] = field(default_factory=list)
    """The epochs that came after an early `break`, or all of them where there was no fault."""


def lengths() -> list[int]:
    """Lengths of the samples: uneven, so that the ranks differ in every round."""
    rng = random.Random(4)
    return [rng.randint(8, 40) for _ in range(SIZE)]


def config_of(cell: Cell) -> OdbConfig:
    """The configuration of all ranks."""
    return OdbConfig(
        token_budget=80,
        depth=8,
        ramp=False,
        shuffle=False,
        queue_steps=1,
        timeout=cell.timeout,
        start_method=cell.start_method,
    )


def run_rank(rank: int, world: int, cell: Cell, folder: str) -> Report:
    """Entry point of a rank (`tests.dist.run_ranks`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    if cell.action == "signal":
        signal.signal(signal.Signals[cell.signal], _take_notice if cell.handled else signal.SIG_DFL)
    leaders = [os.getpid()]
    if world > 1:
        leaders = [0] * world
        dist.all_gather_object(leaders, os.getpid())
    if cell.start_method == "spawn":
        resource_tracker.ensure_running()  # stays for the life of the process
    serve_store(5.0)  # the first store of a process opens a pipe that stays for its life
    injector = Injector(cell, rank, leaders, folder)
    injector.install()
    report = Report()
    gc.collect()
    files, threads = open_files(), threading.active_count()
    try:
        Path(folder, f"training-{rank}").touch()
        _train(cell, injector, report)
    except BaseException as error:
        report.error, report.text = type(error).__name__, str(error)
    report.ended = time.monotonic()
    note_end(folder, rank)
    gc.collect()
    report.files = files, _settled(open_files, files)
    report.threads = threads, _settled(threading.active_count, threads)
    report.left = [f"port {port} is open" for port in ports_noted(folder) if is_open(port)] if rank == 0 else []
    return report


def _train(cell: Cell, injector: Injector, report: Report) -> None:
    if cell.start_method == "spawn":  # the injector does not pickle
        data, collate = Lengths(lengths()), PadCollate()
    else:
        data, collate = FaultyData(lengths()), FaultyCollate(injector, cell.point == STEP)
        data.injector = injector
    with OdbDataLoader(data, collate, config_of(cell), num_workers=cell.workers) as loader:
        try:
            _loop(cell, injector, loader, data, report)
        finally:
            report.raised = time.monotonic()


def _loop(cell: Cell, injector: Injector, loader: OdbDataLoader, data: Lengths, report: Report) -> None:
    if cell.action == "nothing":
        report.after = [run_epoch(loader, data) for _ in range(2)]
        return
    if cell.action == "signal":
        report.after = [_watched_epoch(injector, loader, data) for _ in range(2)]
        return
    for _ in range(EPOCHS):
        for _, info in loader:
            if injector.on_step(loader, info):
                break
        else:
            injector.on_epoch_end(loader)
            continue
        report.after = [run_epoch(loader, data) for _ in range(2)]
        return


def _take_notice(*_: object) -> None:
    """What a trainer does that goes on: it may save a checkpoint at the next update."""


def _watched_epoch(injector: Injector, loader: OdbDataLoader, data: Lengths) -> Epoch:
    """`run_epoch`, with the injector asked in every step and at the end."""
    epoch = run_epoch(loader, data, on_step=lambda info: injector.on_step(loader, info))
    injector.on_epoch_end(loader)
    return epoch


def _settled(count: object, goal: int, seconds: float = 5.0) -> int:
    """The number once it has come down to `goal`, or after some seconds."""
    assert callable(count)
    end = time.monotonic() + seconds
    while count() > goal and time.monotonic() < end:
        time.sleep(0.05)
    return int(count())


def ports_noted(folder: str) -> list[int]:
    """Ports on which the ranks met."""
    return [int(path.name.split("-")[1]) for path in Path(folder).glob("port-*")]


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
