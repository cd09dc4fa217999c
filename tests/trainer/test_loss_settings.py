"""Settings of the Trainer that change what a loss is a mean over: exact per target, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.runtime.errors import OdbError
from odb_factory.tools.demo.model import make_text_model, make_vl_model
from tests.dist import run_ranks
from tests.trainer.settings import (
    PromptSamples,
    arguments,
    check_gradients,
    cross_entropy,
    log_probabilities,
    train,
)
from tests.trainer.test_exact_trainer import _audit_updates, _check_gradients, _Run
from tests.trainer.tiny import free_port, pad_collate

EPSILON = 0.2


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vl_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vl_model(tmp_path_factory.mktemp("vl"))


def load(path: Path, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    return kind.from_pretrained(path, dtype=torch.float64, attn_implementation="eager", **more)


def make(
    model: Any, output: Path, *, collate: Any = pad_collate, trainer: dict[str, Any] | None = None, **how: Any
) -> Any:
    return OdbTrainer(
        model=model,
        args=arguments(output, **how),
        train_dataset=PromptSamples(),
        data_collator=collate,
        odb_config=OdbConfig(token_budget=90, depth=8),
        odb_audit=True,
        **(trainer or {}),
    )


def smoothed(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
    """A share of the loss is that of a uniform distribution over the vocabulary."""
    log_p, targets = log_probabilities(model, batch, labels)
    return (1 - EPSILON) * -log_p.gather(-1, targets[:, None]).sum() + EPSILON * -log_p.mean(-1).sum()


def mean_of_squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of a user's own, a mean over the targets."""
    assert num_items_in_batch is None, "a second normaliser"
    return torch.stack([*squares(outputs["logits"], labels)]).mean()


def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    there = labels[:, 1:] != -100
    log_p = logits[:, :-1][there].log_softmax(-1)
    return log_p.gather(-1, labels[:, 1:][there][:, None]).squeeze(-1) ** 2


NUM_STEPS = {"gradient_accumulation_steps": 1, "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}
SYNC = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}, "split_batches": True}}


@pytest.mark.parametrize(
    ("how", "loss_sum"),
    [
        ({}, cross_entropy),
        (NUM_STEPS, cross_entropy),
        (SYNC, cross_entropy),
        ({"per_device_train_batch_size": 3}, cross_entropy),
        ({"label_smoothing_factor": EPSILON}, smoothed),
    ],
    ids=["train_on_prompt", "num_steps", "sync_each_batch", "batch_size", "label_smoothing"],
)
def test_a_setting_of_the_trainer_is_exact_per_target(
    text_model: Path, tmp_path: Path, how: dict[str, Any], loss_sum: Any
) -> None:
    trainer = make(load(text_model), tmp_path, **how)
    check_gradients(trainer, load(text_model), trainer.train_dataset, loss_sum)


@pytest.mark.parametrize("samples_per_update", [None, 7])
def test_a_loss_of_ones_own_is_exact_per_target(
    text_model: Path, tmp_path: Path, samples_per_update: int | None
) -> None:
    more = {"compute_loss_func": mean_of_squares, "odb_samples_per_update": samples_per_update}
    accumulation = 1 if samples_per_update else 2
    trainer = make(load(text_model), tmp_path, trainer=more, gradient_accumulation_steps=accumulation)
    check_gradients(
        trainer,
        load(text_model),
        trainer.train_dataset,
        lambda model, batch, labels: squares(model(**batch).logits, labels).sum(),
    )


def test_neftune_leaves_the_weighing_alone(text_model: Path, tmp_path: Path) -> None:
    """Its noise depends on the row length of a batch; with the same noise, the update is the mean per target."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    def same_noise(*_: Any, **__: Any) -> None:
        torch.manual_seed(0)

    model, reference = load(text_model), load(text_model)
    for each in (model, reference):
        each.register_forward_pre_hook(same_noise)
    noisy = reference.get_input_embeddings()
    noisy.neftune_noise_alpha = 5.0
    noisy.register_forward_hook(neftune_post_forward_hook)
    trainer = make(model, tmp_path, neftune_noise_alpha=5.0)
    check_gradients(trainer, reference, trainer.train_dataset, cross_entropy)


def test_balance_of_experts_is_weighed_as_the_micro_batch(tmp_path: Path) -> None:
    """It is no sum over targets, so each micro-batch's own counts by its share of the update's targets."""
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    models = [load(tmp_path / "model", experts_implementation="eager") for _ in range(2)]

    def with_balance(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
        outputs = model(**batch)
        there = labels[:, 1:] != -100
        log_p = outputs.logits[:, :-1][there].log_softmax(-1)
        entropy = -log_p.gather(-1, labels[:, 1:][there][:, None]).sum()
        total: torch.Tensor = entropy + 0.5 * outputs.aux_loss * there.sum()
        return total

    trainer = make(models[0], tmp_path / "out")
    check_gradients(trainer, models[1], trainer.train_dataset, with_balance)
    with pytest.raises(AssertionError):  # the balance does count
        check_gradients(make(models[0], tmp_path / "out"), models[1], trainer.train_dataset, cross_entropy)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_count_targets_once_whatever_the_trainer_averages(text_model: Path, tmp_path: Path) -> None:
    how = {"budget": 70, "accumulation": 2, "average_tokens_across_devices": False, **SYNC}
    results = run_ranks(2, _Run(how), text_model, tmp_path, free_port(), True, init_group=False, deadline=80)
    _check_gradients(text_model, results, [list(chain(*steps)) for steps in _audit_updates(tmp_path, 2)])


# -- refused


def test_label_smoothing_of_a_model_with_images_is_refused(vl_model: Path, tmp_path: Path) -> None:
    model = load(vl_model, AutoModelForImageTextToText)
    with pytest.raises(
        ValueError,
        match=r"^odb: label_smoothing_factor: transformers does not shift the labels of "
        r"Qwen3VLForConditionalGeneration, .*; remove label_smoothing_factor\.$",
    ):
        make(model, tmp_path, label_smoothing_factor=0.1)
    make(model, tmp_path, label_smoothing_factor=0.0)


@pytest.mark.parametrize("compiled", [False, True], ids=["with images", "compiled"])
def test_stock_does_not_shift_those_labels(text_model: Path, vl_model: Path, tmp_path: Path, compiled: bool) -> None:
    """The reason for the refusal: fails when transformers shifts them."""
    model = load(text_model) if compiled else load(vl_model, AutoModelForImageTextToText)
    batch = pad_collate([PromptSamples()[i] for i in (0, 1)])
    stock = Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=EPSILON))
    wrapped = torch.compile(model, backend="eager") if compiled else model
    log_p = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits.log_softmax(-1)
    there = batch["labels"] != -100
    own = -log_p[there].gather(-1, batch["labels"][there][:, None]).mean()
    expected = (1 - EPSILON) * own + EPSILON * -log_p[there].mean()
    loss = stock.compute_loss(wrapped, dict(batch))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("how", "more", "sentence"),
    [
        (
            {"label_smoothing_factor": 0.1, "torch_compile": True},
            {},
            "label_smoothing_factor: .* of a compiled model, .*; remove label_smoothing_factor, or torch_compile",
        ),
        ({"optim": "lomo"}, {}, "optim lomo changes the weights with every micro-batch, .*, or use another optim"),
        (
            {"optim": "adalomo", "gradient_accumulation_steps": 1},
            {"odb_samples_per_update": 7},
            "optim adalomo changes the weights with every micro-batch, .*, or use another optim",
        ),
        (
            {"optim": "galore_adamw_layerwise", "gradient_accumulation_steps": 1},
            {},
            "optim galore_adamw_layerwise counts the steps of its learning rates itself; use galore_adamw",
        ),
    ],
    ids=["compiled", "lomo", "adalomo", "layerwise"],
)
def test_what_cannot_be_exact_is_refused(
    text_model: Path, tmp_path: Path, how: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^odb: {sentence}[.]$"):
        make(load(text_model), tmp_path, trainer=more, **how)


def test_an_optimizer_that_steps_in_backward_may_have_one_micro_batch(text_model: Path, tmp_path: Path) -> None:
    make(load(text_model), tmp_path, optim="lomo", gradient_accumulation_steps=1)


# -- targets that were counted, and targets in the batch


def pads_with_a_token(samples: list[Any]) -> Any:
    batch = pad_collate(samples)
    batch["labels"][batch["attention_mask"] == 0] = 0
    return batch


def pads_left(samples: list[Any]) -> Any:
    batch = pad_collate(samples)
    for row, mask in enumerate(batch["attention_mask"]):
        for tensor in batch.values():
            tensor[row] = tensor[row].roll(int((mask == 0).sum()))
    return batch


def masks_a_target(samples: list[Any]) -> Any:
    batch = pad_collate(samples)
    batch["labels"][:, -1] = -100
    return batch


@pytest.mark.parametrize("collate", [pads_with_a_token, pads_left, masks_a_target])
def test_a_batch_with_other_targets_than_its_samples_ends_the_run(
    text_model: Path, tmp_path: Path, collate: Any
) -> None:
    trainer = make(load(text_model), tmp_path, collate=collate)
    with pytest.raises(
        OdbError,
        match=r"^the labels of a micro-batch have \d+ targets, but those of its samples \d+ \(samples .*\), so",
    ):
        train(trainer)


def test_who_counts_otherwise_may_collate_otherwise(text_model: Path, tmp_path: Path) -> None:
    from odb_factory.runtime.observe import observe_sample

    more = {"odb_observe": lambda index, sample: observe_sample(index, sample)}
    gradients, _ = train(make(load(text_model), tmp_path, collate=masks_a_target, trainer=more))
    assert gradients
