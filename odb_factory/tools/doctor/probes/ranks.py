"""Two real ranks on this machine: they connect, measure an exchange, and run a small epoch of `OdbDataLoader`.

They do what a real run does: rank 0 opens the port, the address is agreed through torch.distributed, and each rank
forks its collate process, which has a worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime.exchange import GlooExchange, try_gloo
from odb_factory.runtime.rendezvous import meet
from odb_factory.tools.doctor.network import is_own_address
from odb_factory.tools.doctor.process import answer

WORLD = 2
SAMPLES = 64
EXCHANGES = 101
TIMEOUT = 20.0
"""Seconds that a rank waits for the other; normally less than one."""

DEADLINE = 60.0
"""Seconds for both ranks."""


@dataclass(frozen=True)
class _Lengths:
    """A dataset of text samples of uneven length."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8 + index * 37 % 120)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {key: pad([sample[key] for sample in samples], batch_first=True) for key in samples[0]}


def _gloo(rank: int, port: int) -> dict[str, Any]:
    """Connect and exchange: seconds until connected, median milliseconds of a reduction."""
    begun = time.monotonic()
    rendezvous, store = meet(rank, WORLD, TIMEOUT, port)
    exchange = GlooExchange(rendezvous, TIMEOUT)
    met = time.monotonic() - begun
    times = []
    for value in range(EXCHANGES):
        begun = time.perf_counter()
        total = exchange.sum([value, rank], "the doctor's exchange")
        times.append(time.perf_counter() - begun)
        if total != [WORLD * value, sum(range(WORLD))]:
            raise RuntimeError(f"a sum over {WORLD} ranks came out as {total}")
    exchange.sum([0], "the end of the doctor's exchange")
    del store
    return {"met_s": met, "exchange_ms": 1000 * statistics.median(times), "host": rendezvous.host}


def _loader(rank: int, port: int) -> dict[str, Any]:
    """One epoch: the emitted samples, the number of steps, and the duration in seconds."""
    begun = time.monotonic()
    config = OdbConfig(token_budget=512, depth=16, timeout=TIMEOUT, port=port)
    indices: list[int] = []
    steps = 0
    with OdbDataLoader(_Lengths(SAMPLES), _pad, config, num_workers=1) as loader:
        for _, info in loader:
            steps += 1
            if not info.idle:
                indices += info.indices
    return {"indices": indices, "steps": steps, "seconds": time.monotonic() - begun}


STAGES = {"gloo": _gloo, "loader": _loader}


def _rank(rank: int, port: int, store: str, writer: Connection) -> None:
    """One rank: sends (stage, result), and on an error (stage, text) and ends."""
    torch.set_num_threads(1)
    stage, kept = "gloo", []
    try:
        kept.append(try_gloo())  # first: its error says most
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT)
        )
        for stage, run in STAGES.items():
            writer.send((stage, run(rank, port)))
            dist.barrier()
    except Exception as error:  # anything may be wrong with this machine
        writer.send((stage, str(error).strip() or type(error).__name__))
    finally:
        writer.close()
        os._exit(0)


def run(port: int) -> dict[str, Any]:
    """By stage: the results of both ranks, or `error`, the first message, after which later stages are missing.
    `samples`: the number of samples."""
    own = os.environ.get("MASTER_ADDR", "")
    if not (own and is_own_address(own)):
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # an address of another machine, but rank 0 is here
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="odb-doctor-") as folder:
        readers, processes = [], []
        for rank in range(WORLD):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, port, os.path.join(folder, "store"), writer))
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            return _collect(readers)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: list[Connection]) -> dict[str, Any]:
    results: dict[str, dict[int, Any]] = {stage: {} for stage in STAGES}
    errors: dict[str, str] = {}
    open_readers, end = list(readers), time.monotonic() + DEADLINE
    while open_readers and not errors and time.monotonic() < end:
        for reader in wait(open_readers, timeout=0.5):
            assert isinstance(reader, Connection)
            try:
                stage, value = reader.recv()
            except EOFError:
                open_readers.remove(reader)
                continue
            if isinstance(value, str):
                errors.setdefault(stage, value)
            else:
                results[stage][readers.index(reader)] = value
    report: dict[str, Any] = {"samples": SAMPLES}
    for stage, by_rank in results.items():
        if stage in errors:
            return report | {stage: {"error": errors[stage]}}
        if len(by_rank) < WORLD:
            silent = ", ".join(str(rank) for rank in range(WORLD) if rank not in by_rank)
            late = f"rank {silent} was not done within {DEADLINE:g} s" if open_readers else f"rank {silent} died"
            return report | {stage: {"error": late}}
        report[stage] = {"ranks": [by_rank[rank] for rank in range(WORLD)]}
    return report


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        answer(run(int(sys.argv[1])))
