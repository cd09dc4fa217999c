"""The loss scale in a loop of one's own: exact to float64, over two ranks, accumulation, masks and fillers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.loss_scale import loss_scale
from tests.dist import run_ranks
from tests.trainer.tiny import MaskedSamples, pad_collate, relative_error

VOCABULARY = 50
ACCUMULATION = 2


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 16), torch.nn.Tanh(), torch.nn.Linear(16, VOCABULARY)
    ).double()


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], reduction: str) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1].reshape(-1, VOCABULARY)
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), reduction=reduction)


def _updates(rank: int, world_size: int, size: int) -> list[dict[str, Any]]:
    """Per update: this rank's gradient after averaging over ranks, its indices, and whether there was a filler."""
    data = MaskedSamples(size, VOCABULARY)
    config = OdbConfig(token_budget=70, depth=8, steps_multiple=ACCUMULATION)
    model, updates, window = _model(), [], []
    with OdbDataLoader(data, pad_collate, config) as loader:
        for batch, info in loader:
            window.append((batch, info))
            if len(window) < ACCUMULATION:
                continue
            targets = sum(i.global_loss_tokens for _, i in window)
            for micro, i in window:
                factor = loss_scale(i.loss_tokens, targets, world_size)
                if factor:
                    (_loss(model, micro, "mean") * factor).backward()
            gradients = {}
            for name, parameter in model.named_parameters():
                gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                dist.all_reduce(gradients[name])
                gradients[name] /= world_size
            model.zero_grad()
            indices = [index for _, i in window for index in i.indices]
            updates.append({"gradients": gradients, "indices": indices, "idle": any(i.idle for _, i in window)})
            window = []
    assert not window, "the last accumulation window was not completed"
    return updates


def _reference(indices: list[int], size: int) -> dict[str, torch.Tensor]:
    data, model = MaskedSamples(size, VOCABULARY), _model()
    targets = 0
    for index in indices:
        batch = pad_collate([data[index]])
        targets += int((batch["labels"][:, 1:] != -100).sum())
        _loss(model, batch, "sum").backward()
    return {name: p.grad / targets for name, p in model.named_parameters()}


@pytest.mark.distributed
def test_gradient_of_every_update_equals_the_single_process_reference() -> None:
    size = 41  # odd: the ranks' shards and the last round are uneven
    first, second = run_ranks(2, _updates, size)
    assert len(first) == len(second) > 2
    for mine, other in zip(first, second, strict=True):
        reference = _reference(mine["indices"] + other["indices"], size)
        assert relative_error(mine["gradients"], reference) < 1e-12
        assert relative_error(other["gradients"], reference) < 1e-12
    assert sorted(i for u in first + second for i in u["indices"]) == list(range(size))
    assert any(u["idle"] for u in first + second), "this world has no filler, so the test misses its point"
