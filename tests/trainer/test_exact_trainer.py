"""The same through `transformers.Trainer`: no second normaliser acts, whatever the model's own loss does."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.tools.demo.model import make_text_model
from tests.dist import run_ranks
from tests.trainer.tiny import (
    KeepDouble,
    MaskedSamples,
    free_port,
    launch_like_torchrun,
    pad_collate,
    relative_error,
)

SIZE = 23
VOCABULARY = 100


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


class Collect(TrainerCallback):
    """Gradients before each optimizer step, as the optimizer will see them."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        inner = getattr(model, "module", model)
        self.gradients.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in inner.named_parameters()}
        )


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def _trainer(
    model_path: Path,
    output: Path,
    *,
    budget: int,
    accumulation: int,
    samples_per_update: int | None = None,
    **arguments: Any,
) -> OdbTrainer:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    defaults: dict[str, Any] = {
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "remove_unused_columns": False,
    }
    args = TrainingArguments(str(output), gradient_accumulation_steps=accumulation, **(defaults | arguments))
    return OdbTrainer(
        model=model,
        args=args,
        train_dataset=MaskedSamples(SIZE, VOCABULARY),
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=budget, depth=8),
        odb_samples_per_update=samples_per_update,
        odb_audit=True,
    )


def _run(rank: int, world_size: int, model_path: Path, output: Path, port: int, accepts: bool, **how: Any) -> Any:
    if world_size > 1:
        launch_like_torchrun(rank, world_size, port)
    torch.set_num_threads(1)
    trainer = _trainer(model_path, output, **how)
    assert trainer.model_accepts_loss_kwargs, "transformers changed: this text model no longer takes an item count"
    trainer.model_accepts_loss_kwargs = accepts
    collect = Collect()
    trainer.add_callback(collect)
    with KeepDouble():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return collect.gradients, losses, trainer.odb_summary


def _audit_updates(output: Path, world_size: int) -> list[list[list[int]]]:
    """[update][step] indices over all ranks."""
    ranks = [
        [json.loads(line) for line in (output / f"odb_audit.rank{r}.jsonl").read_text().splitlines()]
        for r in range(world_size)
    ]
    assert len({len(lines) for lines in ranks}) == 1
    updates: dict[int, list[list[int]]] = {}
    for lines in zip(*ranks, strict=True):
        (update,) = {line["update"] for line in lines}
        updates.setdefault(update, []).append([index for line in lines for index in line["indices"]])
    assert list(updates) == list(range(1, len(updates) + 1))
    return list(updates.values())


def _reference(model_path: Path, indices: list[int]) -> tuple[dict[str, torch.Tensor], float]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    data, targets, total = MaskedSamples(SIZE, VOCABULARY), 0, 0.0
    model.train()
    with KeepDouble():
        for index in indices:
            batch = pad_collate([data[index]])
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            targets += int((labels[:, 1:] != -100).sum())
            loss.backward()
            total += float(loss.detach())
    return {n: p.grad / targets for n, p in model.named_parameters()}, total / targets


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("accepts", [True, False], ids=["model takes an item count", "model takes none"])
def test_two_ranks_with_accumulation_equal_the_reference(text_model: Path, tmp_path: Path, accepts: bool) -> None:
    how = {"budget": 70, "accumulation": 4}
    results = run_ranks(2, _Run(how), text_model, tmp_path, free_port(), accepts, init_group=False, deadline=80)
    updates = _audit_updates(tmp_path, 2)
    assert {len(steps) for steps in updates} == {4}
    fillers = json.loads((tmp_path / "odb_summary.json").read_text())["fillers"]
    assert fillers > 0, "no filler took part"
    _check_gradients(text_model, results, [list(chain(*steps)) for steps in updates])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_of_steady_size_equal_the_reference(text_model: Path, tmp_path: Path, world_size: int) -> None:
    wanted = 7
    run = _Run({"budget": 70, "accumulation": 1, "samples_per_update": wanted})
    results = run_ranks(world_size, run, text_model, tmp_path, free_port(), True, init_group=False, deadline=80)
    updates = _audit_updates(tmp_path, world_size)
    for steps in updates[:-1]:
        sizes = [len(step) for step in steps]
        assert sum(sizes) >= wanted > sum(sizes[:-1]), "an update closes as soon as it has that many"
    assert len({len(steps) for steps in updates}) > 1, "the number of micro-batches is dynamic"
    _check_gradients(text_model, results, [list(chain(*steps)) for steps in updates])


def _check_gradients(text_model: Path, results: Any, updates: list[list[int]]) -> None:
    assert sorted(chain(*updates)) == list(range(SIZE))
    for gradients, losses, _ in results:
        assert len(gradients) == len(updates)
        for mine, logged, indices in zip(gradients, losses, updates, strict=True):
            reference, loss = _reference(text_model, indices)
            assert relative_error(mine, reference) < 1e-12
            assert logged == pytest.approx(loss, rel=1e-6)  # Trainer sums up in float32


class _Run:
    """`_run` with keyword arguments, in a form that pickles."""

    def __init__(self, how: dict[str, Any]) -> None:
        self.how = how

    def __call__(self, *args: Any) -> Any:
        return _run(*args, **self.how)


@pytest.mark.slow
@pytest.mark.distributed
def test_logged_loss_does_not_depend_on_ranks_or_budget(text_model: Path, tmp_path: Path) -> None:
    losses = []
    for world_size, budget in ((1, 60), (1, 200), (2, 60), (2, 130)):
        output = tmp_path / f"{world_size}-{budget}"
        run = _Run({"budget": budget, "accumulation": 24})
        (_, logged, summary), *_ = run_ranks(
            world_size, run, text_model, output, free_port(), True, init_group=False, deadline=80
        )
        assert len(logged) == 1, "one update per epoch was asked for"
        losses.append(logged[0])
        assert summary["samples"] == SIZE
    _, expected = _reference(text_model, list(range(SIZE)))
    assert losses == pytest.approx([expected] * 4, rel=1e-6)  # Trainer sums up in float32
