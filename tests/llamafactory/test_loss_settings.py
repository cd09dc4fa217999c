"""LLaMA-Factory's settings that change what a loss is a mean over, through its own trainer: exact per target."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.hparams.training_args import TrainingArguments
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from odb_factory import OdbConfig
from odb_factory.llamafactory.arguments import OdbFinetuningArguments
from odb_factory.llamafactory.collator import OdbCollator
from odb_factory.llamafactory.online_dataset import observe_online
from odb_factory.llamafactory.trainer import OdbSeq2SeqTrainer
from odb_factory.runtime.errors import OdbError
from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.helpers import Parts, row
from tests.trainer.settings import PromptSamples, arguments, check_gradients, cross_entropy, log_probabilities, train
from tests.trainer.tiny import pad_collate

ALPHA = 0.7


def load(path: Path, kind: Any = AutoModelForCausalLM) -> Any:
    return kind.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def make(
    model: Any, output: Path, data: Any, collate: Any, fields: dict[str, Any], how: Any = None, **more: Any
) -> Any:
    return OdbSeq2SeqTrainer(
        model=model,
        args=arguments(output, TrainingArguments, **(how or {})),
        finetuning_args=OdbFinetuningArguments(odb=True, finetuning_type="full", **fields),
        tokenizer=None,
        **{"processor": None, "odb_config": OdbConfig(token_budget=90, depth=8), **more},
        train_dataset=data,
        data_collator=collate,
        odb_audit=True,
    )


def dft(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
    """Each target's loss times its own probability, which no gradient goes through."""
    log_p, targets = log_probabilities(model, batch, labels)
    own = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return -(own.detach().exp() * own).sum()


def eaft(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
    """Each target's loss times the entropy of the 20 most likely tokens, over 3, to a power."""
    log_p, targets = log_probabilities(model, batch, labels)
    best = log_p.detach().topk(20).values.log_softmax(-1)
    entropy = -(best.exp() * best).sum(-1)
    return -((entropy / 3) ** ALPHA * log_p.gather(-1, targets[:, None]).squeeze(-1)).sum()


@pytest.mark.parametrize("samples_per_update", [None, 7])
@pytest.mark.parametrize(
    ("fields", "loss_sum"),
    [({"use_dft_loss": True}, dft), ({"use_eaft_loss": True, "eaft_alpha": ALPHA}, eaft)],
    ids=["dft", "eaft"],
)
def test_a_loss_of_llamafactory_is_exact_per_target(
    text_model: Path, tmp_path: Path, fields: dict[str, Any], loss_sum: Any, samples_per_update: int | None
) -> None:
    data = PromptSamples()
    how = {"gradient_accumulation_steps": 1 if samples_per_update else 2}
    more = {"odb_samples_per_update": samples_per_update}
    trainer = make(load(text_model), tmp_path, data, pad_collate, fields, how, **more)
    check_gradients(trainer, load(text_model), data, loss_sum)


def test_asft_is_exact_per_target(text_model: Path, tmp_path: Path) -> None:
    """Both of its parts, the divergence from the model as it was, too; stock does not divide by accumulation."""
    before = load(text_model)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.mul_(1.1)
    frozen = copy.deepcopy(before).eval()

    def asft(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
        log_p, targets = log_probabilities(model, batch, labels)
        own = log_p.gather(-1, targets[:, None]).squeeze(-1)
        with torch.no_grad():
            log_q, _ = log_probabilities(frozen, batch, labels)
        divergence = (log_q.exp() * (log_q - log_p)).sum()
        total: torch.Tensor = -(own.detach().exp() * own).sum() + ALPHA * divergence
        return total

    data = PromptSamples()
    fields = {"use_asft_loss": True, "asft_alpha": ALPHA}
    trainer = make(load(text_model), tmp_path, data, pad_collate, fields, ref_model=before)
    check_gradients(trainer, load(text_model), data, asft)


def test_label_smoothing_with_lora_is_exact_per_target(text_model: Path, tmp_path: Path) -> None:
    """The Trainer looks through the adapter for the class that says whether labels are shifted."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(load(text_model), config)
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
        return model

    def smoothed(model: Any, batch: Any, labels: torch.Tensor) -> torch.Tensor:
        log_p, targets = log_probabilities(model, batch, labels)
        return -0.8 * log_p.gather(-1, targets[:, None]).sum() - 0.2 * log_p.mean(-1).sum()

    data = PromptSamples()
    trainer = make(adapted(), tmp_path, data, pad_collate, {}, {"label_smoothing_factor": 0.2})
    check_gradients(trainer, adapted(), data, smoothed)


@pytest.mark.parametrize(
    ("choices", "fields", "loss_sum"),
    [
        ({"train_on_prompt": True}, {}, cross_entropy),
        ({"mask_history": True}, {}, cross_entropy),
        ({"train_on_prompt": True}, {"use_dft_loss": True}, dft),
        ({}, {"use_eaft_loss": True, "eaft_alpha": ALPHA}, eaft),
    ],
    ids=["train_on_prompt", "mask_history", "dft", "eaft"],
)
def test_a_setting_is_exact_per_target_with_images(
    demo: DemoPaths,
    vl: Parts,
    media: dict[str, Any],
    tmp_path: Path,
    choices: dict[str, Any],
    fields: dict[str, Any],
    loss_sum: Any,
) -> None:
    parts = vl.with_data_args(**choices)
    rows = [
        row("One?", "One. " * (1 + 3 * i), "Two?", "Two. " * (9 - i), images=None)
        if i % 3
        else row("<image>What is it?", "A picture. " * (1 + i), images=[media["small"]])
        for i in range(9)
    ]
    data = parts.online(rows)
    supervised = [data[i]["labels"][0] != -100 for i in range(len(rows))]
    assert all(supervised) if "train_on_prompt" in choices else not any(supervised)
    collate = OdbCollator(parts.stock_collator(), None)
    trainer = make(
        load(demo.model, AutoModelForImageTextToText),
        tmp_path,
        data,
        collate,
        fields,
        processor=parts.processor,
        odb_config=OdbConfig(token_budget=200, depth=8, pad_to_multiple_of=8),
        odb_observe=observe_online,
    )
    check_gradients(trainer, load(demo.model, AutoModelForImageTextToText), data, loss_sum, collate)


def test_padding_that_counts_as_a_target_ends_the_run(vl: Parts, demo: DemoPaths, tmp_path: Path) -> None:
    """Refused before; here a collator of somebody else's would let it pass."""
    data = vl.online([row("Why?", "So. " * (1 + 5 * (i % 3))) for i in range(9)])
    stock = vl.stock_collator()
    stock.label_pad_token_id = stock.tokenizer.pad_token_id
    trainer = make(
        load(demo.model, AutoModelForImageTextToText),
        tmp_path,
        data,
        OdbCollator(stock, None),
        {},
        processor=vl.processor,
        odb_config=OdbConfig(token_budget=200, depth=8, pad_to_multiple_of=8),
        odb_observe=observe_online,
    )
    with pytest.raises(OdbError, match=r"^the labels of a micro-batch have \d+ targets, but those of its samples \d+ "):
        train(trainer)
