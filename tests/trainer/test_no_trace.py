"""What a step on trial leaves behind in a model: nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory.trainer.memory_probe import CpuMeter, DeviceMeter, LiveBytes, make_meter
from odb_factory.trainer.no_trace import no_trace
from odb_factory.trainer.optimizer_memory import pending_state_bytes

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """Changes whatever a module may change in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("later", None)
        self.longest, self.deltas = 7, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, len(x))
        self.deltas = x.sum()
        self.cache = torch.ones(5)
        self.later = torch.ones(2)
        self.register_buffer("more", torch.ones(1))
        return torch.nn.functional.dropout(self.norm(x), 0.5)


def test_modules_and_random_states_are_as_before() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Layer())
    model.eval()
    model[1].norm.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    cache = model[1].cache
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    def step() -> None:
        model.train()
        model(torch.rand(16, 4)).sum().backward()
        assert model[0].weight.grad is not None
        assert not torch.equal(before["1.norm.running_mean"], model[1].norm.running_mean)
        random.random(), np.random.rand()
        raise KeyError("whatever happens")

    with pytest.raises(KeyError), no_trace(model, CPU):
        step()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert model[1].cache is cache
    assert (model[1].longest, model[1].deltas, model[1].later) == (7, None, None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_live_bytes_are_those_of_the_tensors_that_live() -> None:
    held = torch.zeros(1000)
    meter = CpuMeter([held, held[:10]], 24, 10**6, 1)
    keep: list[torch.Tensor] = []

    def step() -> None:
        a = held + 1  # 4000
        b = a * 2  # 8000
        del a
        keep.append((b + 1)[:5])  # 8000: `a` is gone
        del b
        held.add_(1)

    assert meter.peak(step) == 4000 + 24 + 8000
    assert meter.peak(lambda: held.view(10, 100)) == 4000 + 24 + 4000, "what the step before kept is held"
    keep.clear()
    assert meter.peak(lambda: None) == 4024
    assert meter.capacity == 10**6


class Device:
    """The statistics of an accelerator's memory, as torch's device modules give them."""

    def __init__(self) -> None:
        self.free, self.reserved, self.most, self.calls = 600, 300, 0, []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 1000  # others hold 100

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.most


@pytest.mark.parametrize(("limit", "capacity"), [(None, 900), (500, 500), (5000, 900)])
def test_a_device_has_what_is_free_and_what_the_process_has_reserved(limit: int | None, capacity: int) -> None:
    device = Device()
    meter = DeviceMeter(device, torch.device("cuda"), limit)
    assert meter.capacity == capacity
    device.calls.clear()

    def step() -> None:
        assert device.calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
        device.most = 700

    assert meter.peak(step) == 700
    assert device.calls[3:] == ["synchronize", "empty_cache"]


def test_a_device_without_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="auto cannot measure the memory of a mps device; set a number of tokens"):
        make_meter(torch.device("mps"), [], 0, None, 1)


def test_live_bytes_hold_what_a_backward_needs() -> None:
    weight = torch.ones(100, requires_grad=True)
    live = LiveBytes()
    live.add(weight)
    with live:
        loss = weight.exp().exp().sum()
        assert live.live == 400 * 3 + 4
        loss.backward()
    del loss
    assert live.live == 800, "the weight and its gradient"
    assert live.peak >= 1600


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (sgd, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), 3),
    ],
)
def test_states_to_come_are_what_a_first_step_makes(make: Any, factor: int, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(50, 40)), torch.nn.Parameter(torch.ones(7), requires_grad=False)]
    optimizer = make([{"params": parameters, "weight_decay": 0.01}])
    expected = pending_state_bytes(optimizer, CPU)
    assert expected == pytest.approx(factor * 50 * 40 * 4, abs=16)
    assert not optimizer.state, "the optimizer itself has taken no step"
    assert pending_state_bytes(optimizer, torch.device("meta")) == 0
    parameters[0].grad = torch.ones(50, 40)
    optimizer.step()
    made = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    assert made == pytest.approx(expected, abs=16)
    if factor:
        assert pending_state_bytes(optimizer, CPU) == 0


def test_an_optimizer_that_cannot_be_tried_counts_as_adam() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, model: Any) -> None:
            super().__init__(parameters, lr=0.1)

    optimizer = Odd([torch.nn.Parameter(torch.ones(10))], model=object())
    assert pending_state_bytes(optimizer, CPU) == 80
