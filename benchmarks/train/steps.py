"""What each rank ran in each step: by ODB's audit, a driven run's record, or a replay of the stock samplers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.batchers import packing, standard
from benchmarks.batchers.micro import IDLE, padded
from benchmarks.encoding import Encoded
from benchmarks.epochs import Epoch, Micro
from benchmarks.errors import BenchmarkError
from benchmarks.train.record import Line, digest
from benchmarks.train.setup import PAD_MULTIPLE, Prepared, Size
from odb_factory.tools.plan.fixed import deal


def replay(method: str, data: Prepared, size: Size, seed: int, counted: int) -> Epoch:
    """The epoch of `standard`, `sorted` or `packing`.

    Args:
        counted: padded tokens by the trainer's own count.

    Raises:
        BenchmarkError: the replayed epoch has another number of them.
    """
    common = {"world": size.ranks, "seed": seed, "multiple": PAD_MULTIPLE}
    if method == "packing":
        lengths = data.packed.lengths
        epoch = packing(
            lengths,
            cutoff=size.cutoff,
            rows_per_batch=size.batch_size,
            padding_free=False,
            order=range(len(lengths)),
            **common,
        )
    elif method == "standard":
        epoch = standard(data.train.lengths, batch_size=size.batch_size, **common)
    else:
        epoch = _sorted(data.train.lengths, size, seed)
    if epoch.padded_tokens != counted:
        raise BenchmarkError(
            f"the replayed epoch of {method} has {epoch.padded_tokens:,} padded tokens, the trainer counted "
            f"{counted:,}: this version of LLaMA-Factory, transformers or accelerate batches otherwise."
        )
    return epoch


def _sorted(lengths: list[int], size: Size, seed: int) -> Epoch:
    """The order of `group_by_length` in a run: out of the global generator, after torch's loader drew its seed."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.empty((), dtype=torch.int64).random_()
        order = get_length_grouped_indices(lengths, size.batch_size)
    steps = deal(order, size.batch_size, size.ranks)
    return Epoch(tuple(tuple(padded(batch, lengths, PAD_MULTIPLE) for batch in step) for step in steps), tuple(lengths))


def audited(output: Path, data: Encoded, size: Size, *, counted: int, steps: int) -> Epoch:
    """The epoch of ODB.

    Raises:
        BenchmarkError: the audit contradicts what ODB promises, above all that each sample is emitted once.
    """
    audits = [_read_lines(output / f"odb_audit.rank{rank}.jsonl") for rank in range(size.ranks)]
    every = [line for audit in audits for line in audit]
    lengths = data.lengths
    steps_run = tuple(tuple(_micro(line, lengths) for line in step) for step in zip(*audits, strict=False))
    epoch = Epoch(steps_run, tuple(lengths))
    seen = {index: length for line in every for index, length in zip(line["indices"], line["lengths"], strict=True)}
    several = [micro.padded_tokens for step in epoch.steps for micro in step if len(micro.samples) > 1]
    checks = {
        "each sample is emitted exactly once": epoch.emitted == Counter(range(len(lengths))),
        "every rank runs the trainer's number of steps": {len(audit) for audit in audits} == {steps},
        "lengths equal those of stock preprocessing": seen == dict(enumerate(lengths)),
        "loss tokens equal those of stock preprocessing": sum(line["loss_tokens"] for line in every)
        == sum(data.loss_tokens),
        "no group of several samples exceeds the budget": max(several, default=0) <= size.budget,
        "padded tokens equal the trainer's count": epoch.padded_tokens == counted,
    }
    for text, holds in checks.items():
        if not holds:
            raise BenchmarkError(f"the audit in {output} contradicts this: {text}.")
    return epoch


def _micro(line: dict[str, Any], lengths: list[int]) -> Micro:
    return padded(line["indices"], lengths, PAD_MULTIPLE) if line["indices"] else IDLE


def recorded(ranks: list[list[Line]], data: Encoded) -> Epoch:
    """The epoch of a driven run, whose samples are known by their content.

    A sample that comes more often than the data hold it is counted as a repetition of the last one with that content.

    Raises:
        BenchmarkError: a row is no sample of the data.
    """
    lengths = data.lengths
    left: dict[str, list[int]] = defaultdict(list)
    for index, name in reversed(list(enumerate(map(digest, data.input_ids)))):
        left[name].append(index)

    def take(name: str) -> int:
        if name not in left:
            raise BenchmarkError("a rank trained on a row that is no sample of the data; the driver is at fault.")
        return left[name].pop() if len(left[name]) > 1 else left[name][0]

    def micro(line: Line | None) -> Micro:
        if line is None:
            return IDLE
        samples = tuple(map(take, line.rows)) if line.loss_tokens else ()
        return Micro(samples, line.width * len(line.rows), line.width**2 * len(line.rows))

    return Epoch(tuple(tuple(map(micro, step)) for step in zip_longest(*ranks)), tuple(lengths))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
