"""The public package: what it hands to `all_gather`, read in its own collate processes; beyond, the formula."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from benchmarks.exchange.world import CONFIG, NUMBER, RoundCost, Tokens, collate, lengths_of
from benchmarks.loader.methods import Holding
from tests.dist import run_ranks

WINDOW = CONFIG.depth
"""Its window, as large as ours: `prefetch_factor` times one worker."""
FIRST = 2 + 2 * WINDOW
"""Numbers of its gather: output slots, groups, and of as many groups as the window could form, samples and tokens."""
SECOND = WINDOW
"""Numbers of the second gather of `loss_scaling="exact"`, in rounds in which a rank's groups were adjusted."""


def installed() -> bool:
    return importlib.util.find_spec("odb") is not None


def measure_real(world: int, per_rank: int = 200, seed: int = 0, deadline: float = 240.0) -> RoundCost:
    """An epoch of real gloo processes. A round is a first gather."""
    with tempfile.TemporaryDirectory(prefix="odb-exchange-") as folder:
        ranks = run_ranks(world, _epoch, per_rank, seed, folder, deadline=deadline)
        calls = [_read(Path(folder) / f"rank-{rank}") for rank in range(world)]
    rounds = sum(numbers == FIRST for numbers, _ in calls[0])
    return RoundCost(
        steps=max(steps for _, steps in ranks) / rounds,
        sent_bytes=NUMBER * max(sum(sent for sent, _ in rank) for rank in calls) / rounds,
        received_bytes=NUMBER * max(sum(got for _, got in rank) for rank in calls) / rounds,
        first_step_s=max(first for first, _ in ranks),
    )


def by_formula(world: int) -> RoundCost:
    """At most: both gathers in every round, which is when some rank's groups were adjusted in each."""
    sent = NUMBER * (FIRST + SECOND)
    return RoundCost(steps=float("nan"), sent_bytes=sent, received_bytes=world * sent)


def _epoch(rank: int, world: int, per_rank: int, seed: int, folder: str) -> tuple[float, int]:
    """(seconds to the first step, steps); the collate process writes each gather to a file."""
    import odb

    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about calls that it makes
    data = Tokens(lengths_of(per_rank * world, seed))
    _note_gathers(Path(folder) / f"rank-{rank}")
    dist.barrier()
    start = time.monotonic()
    first, steps = 0.0, 0
    loader = odb.ODBDataLoader(
        Holding(data),
        token_budget=CONFIG.token_budget,
        sampler=DistributedSampler(data, seed=seed),
        num_workers=1,
        prefetch_factor=WINDOW,
        multiprocessing_context="fork",
        collate_fn=collate,
        loss_scaling="exact",
    )
    for _ in loader:
        first = first or time.monotonic() - start
        steps += 1
    dist.barrier()
    return first, steps


def _note_gathers(file: Path) -> None:
    """In processes forked from this one, a line for each `all_gather_into_tensor`: numbers sent, numbers received."""
    original, parent = dist.all_gather_into_tensor, os.getpid()

    def noted(output: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != parent:
            with file.open("a") as lines:
                lines.write(f"{values.numel()} {output.numel()}\n")
        return original(output, values, *args, **kwargs)

    dist.all_gather_into_tensor = noted  # type: ignore[assignment]


def _read(file: Path) -> list[tuple[int, int]]:
    pairs = (line.split() for line in file.read_text().splitlines())
    return [(int(sent), int(received)) for sent, received in pairs]
