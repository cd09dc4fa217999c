"""The world that is measured: samples, config and collate function, the same for both packages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from odb_factory import OdbConfig
from odb_factory.core.stats import StepTotals

CONFIG = OdbConfig(token_budget=4096, depth=64, timeout=120.0)
NUMBER = 8
"""Bytes of a number: both packages exchange int64."""


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What a round costs one rank; bytes of the rank that has most."""

    steps: float
    """Steps that a round emits, on average."""
    sent_bytes: float
    """What the rank puts into collectives."""
    received_bytes: float
    """What it gets out of them: of a reduction as much as it puts in, of a gather that of every rank."""
    first_step_s: float | None = None
    """Until the slowest rank has its first micro-batch, the start of processes and connections included."""

    @property
    def fixed_bytes(self) -> float:
        """Sent beyond the totals of the steps (`StepTotals`), which depend on the data; of ours."""
        return self.sent_bytes - NUMBER * StepTotals.WIDTH * self.steps


def lengths_of(size: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (tokens)."""
    rng = random.Random(seed)
    return [min(2048, max(8, int(rng.lognormvariate(5.5, 0.8)))) for _ in range(size)]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sample i has `lengths[i]` tokens, all of them i."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((self._lengths[index],), index)
        return {"input_ids": ids, "labels": ids}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads both tensors."""
    return {name: pad_sequence([s[name] for s in samples], batch_first=True) for name in ("input_ids", "labels")}
