"""What the tests of loss settings share: a run in one process, and the reference made of its own micro-batches."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tests.trainer.test_exact_trainer import Collect
from tests.trainer.tiny import KeepDouble, MaskedSamples, pad_collate, relative_error

SIZE = 23
VOCABULARY = 100
ACCUMULATION = 2
TOLERANCE = 1e-10

Batch = dict[str, torch.Tensor]
LossSum = Callable[[Any, Batch, torch.Tensor], torch.Tensor]
"""(model, batch without labels, labels) to the sum of the loss over the targets of `labels[:, 1:]`."""


class PromptSamples(MaskedSamples):
    """Masked prompts, but every third sample is trained on from its first token on, as with `train_on_prompt`."""

    def __init__(self, size: int = SIZE, vocabulary: int = VOCABULARY) -> None:
        super().__init__(size, vocabulary)
        for item in self.items[::3]:
            item["labels"] = list(item["input_ids"])


def arguments(output: Path, kind: type[Any] = TrainingArguments, **more: Any) -> Any:
    """Training arguments of a run on CPUs that leaves the weights as they are."""
    values = {
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return kind(output_dir=str(output), **copy.deepcopy(values | more))  # Trainer changes an accelerator_config


def train(trainer: Any) -> tuple[list[dict[str, torch.Tensor]], list[list[list[int]]]]:
    """The gradient of each update, and the indices of its micro-batches."""
    collect = Collect()
    trainer.add_callback(collect)
    with KeepDouble():
        trainer.train()
    updates: dict[int, list[list[int]]] = {}
    for line in (Path(trainer.args.output_dir) / "odb_audit.rank0.jsonl").read_text().splitlines():
        step = json.loads(line)
        updates.setdefault(step["update"], []).append(step["indices"])
    return collect.gradients, list(updates.values())


def check_gradients(
    trainer: Any,
    model: Any,
    data: Any,
    loss_sum: LossSum,
    collate: Callable[[list[Any]], Any] = pad_collate,
) -> None:
    """Train, and compare each update's gradient with that of the sum of `loss_sum` over its targets' number.

    `model` has the weights of the trainer's and is none of its own.
    """
    gradients, updates = train(trainer)
    assert sorted(chain(*chain(*updates))) == list(range(len(data)))
    sizes = {len(step) for step in chain(*updates) if step}
    assert len(sizes) > 1, "micro-batches of one size cannot tell a weighed mean from a plain one"
    assert any(len([step for step in steps if step]) > 1 for steps in updates), "no update has several micro-batches"
    assert len(gradients) == len(updates)
    for mine, steps in zip(gradients, updates, strict=True):
        reference = _gradient(model, [collate([data[index] for index in step]) for step in steps if step], loss_sum)
        assert relative_error(mine, reference) < TOLERANCE


def _gradient(model: Any, batches: list[Any], loss_sum: LossSum) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    targets = 0
    with KeepDouble():
        for batch in batches:
            labels = batch.pop("labels")
            targets += int((labels[:, 1:] != -100).sum())
            loss_sum(model, batch, labels).backward()
    assert targets
    return {n: torch.zeros_like(p) if p.grad is None else p.grad / targets for n, p in model.named_parameters()}


def log_probabilities(model: Any, batch: Batch, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(targets, vocabulary) log-probabilities where there is a target, and the targets."""
    logits = model(**batch).logits[:, :-1]
    there = labels[:, 1:] != -100
    return logits[there].log_softmax(-1), labels[:, 1:][there]


def cross_entropy(model: Any, batch: Batch, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the plain loss."""
    log_p, targets = log_probabilities(model, batch, labels)
    return -log_p.gather(-1, targets[:, None]).sum()
