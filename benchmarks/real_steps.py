"""What each rank ran in each step: of ODB out of its audit files, of Standard by replaying the stock sampler."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.real_setup import SEED, Lengths

PAD_MULTIPLE = 8
"""LLaMA-Factory pads training batches to a multiple of this."""


@dataclass(frozen=True)
class Run:
    """`steps[step][rank]` are the indices of a micro-batch; `lengths` the tokens of each index."""

    steps: list[list[list[int]]]
    lengths: list[int]
    fillers: int = 0

    def emitted(self) -> Counter[int]:
        """How often each index was trained on, over all ranks."""
        return Counter(index for step in self.steps for group in step for index in group)

    def padded(self, group: list[int]) -> int:
        """Tokens of a micro-batch with its padding."""
        longest = max((self.lengths[index] for index in group), default=0)
        return -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE * len(group)

    def padded_tokens(self) -> int:
        """Tokens that the model ran on, over all ranks."""
        return sum(self.padded(group) for step in self.steps for group in step)

    def ideal_share(self) -> float:
        """Real tokens / (ranks x sum over steps of the slowest rank's padded tokens); 1: no padding, no waiting."""
        real = sum(self.lengths[index] * times for index, times in self.emitted().items())
        return real / sum(len(step) * max(map(self.padded, step)) for step in self.steps)


def replay_standard(lengths: Lengths, *, ranks: int, batch_size: int, padded: int) -> Run:
    """The batches of the stock trainer: accelerate's seeded permutation, cut into batches that are dealt to the ranks.

    Raises:
        BenchmarkError: they do not add up to the `padded` tokens that the trainer counted.
    """
    import torch

    size = len(lengths.tokens)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED)).tolist()
    batches = [order[start : start + batch_size] for start in range(0, size, batch_size)]
    run = Run([batches[start : start + ranks] for start in range(0, len(batches), ranks)], lengths.tokens)
    if run.padded_tokens() != padded:
        raise BenchmarkError(
            f"the replayed order of Standard has {run.padded_tokens():,} padded tokens, the trainer counted "
            f"{padded:,}: this version of accelerate or transformers draws another order."
        )
    return run


def read_audit(output: Path, lengths: Lengths, *, ranks: int, budget: int, padded: int, steps: int) -> Run:
    """The steps of ODB.

    Raises:
        BenchmarkError: the audit contradicts what ODB promises, above all that each conversation is emitted once.
    """
    audits = [_read_lines(output / f"odb_audit.rank{rank}.jsonl") for rank in range(ranks)]
    every = [line for audit in audits for line in audit]
    run = Run(
        [[line["indices"] for line in step] for step in zip(*audits, strict=False)],
        lengths.tokens,
        sum(line["idle"] for line in every),
    )
    seen = {index: length for line in every for index, length in zip(line["indices"], line["lengths"], strict=True)}
    groups = [group for step in run.steps for group in step if len(group) > 1]
    checks = {
        "each conversation is emitted exactly once": run.emitted() == Counter(range(len(lengths.tokens))),
        "every rank runs the trainer's number of steps": {len(audit) for audit in audits} == {steps},
        "lengths equal those of stock preprocessing": seen == dict(enumerate(lengths.tokens)),
        "loss tokens equal those of stock preprocessing": sum(line["loss_tokens"] for line in every)
        == sum(lengths.loss_tokens),
        "no group of several samples exceeds the budget": max(map(run.padded, groups), default=0) <= budget,
        "padded tokens equal the trainer's count": run.padded_tokens() == padded,
    }
    for text, holds in checks.items():
        if not holds:
            raise BenchmarkError(f"the audit in {output} contradicts this: {text}.")
    print("  audit: " + "; ".join(checks), flush=True)
    return run


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
