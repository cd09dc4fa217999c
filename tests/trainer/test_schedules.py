"""Every learning rate schedule that stock offers, with each kind of warm-up, beside stock's own rates.

Stock's rates are those of fixed batches of one sample, so that its step numbers are numbers of samples: where a
schedule follows the samples, ours must have, after any number of them, exactly stock's rate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, SchedulerType, Trainer, TrainerCallback, TrainingArguments

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.tools.demo.model import make_text_model
from tests.trainer.tiny import MaskedSamples, pad_collate

SIZE, EPOCHS = 48, 2
TOTAL = SIZE * EPOCHS

WARMUPS: dict[str, float] = {"none": 0, "a tenth": 0.1, "3 updates": 3}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "cosine, 2 waves": ("cosine", {"num_cycles": 2.0}),
    "cosine_with_restarts": ("cosine_with_restarts", {"num_cycles": 3}),
    "polynomial": ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    "cosine_with_min_lr": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "cosine_warmup_with_min_lr": ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.01}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant_with_warmup", {}),
    "inverse_sqrt": ("inverse_sqrt", {}),
    "inverse_sqrt, timescale": ("inverse_sqrt", {"timescale": 5}),
    "warmup_stable_decay": ("warmup_stable_decay", {}),
    "warmup_stable_decay, lengths": ("warmup_stable_decay", {"num_stable_steps": 4, "num_decay_steps": 3}),
}

BY_UPDATES = {
    ("inverse_sqrt", "none"),  # its time scale is then 10,000 updates
    ("inverse_sqrt", "3 updates"),
    ("inverse_sqrt, timescale", "none"),
    ("inverse_sqrt, timescale", "3 updates"),
    ("warmup_stable_decay, lengths", "none"),
    ("warmup_stable_decay, lengths", "3 updates"),
}
"""Everything in them is given in updates, so they go by updates: update for update as stock."""

WARMUP_BY_SAMPLES_ONLY = {("inverse_sqrt, timescale", "a tenth"), ("warmup_stable_decay, lengths", "a tenth")}
"""The warm-up is a share of the run, and what follows it is given in updates."""


class WithLlamaFactorysLengths(Trainer):
    """Makes the schedule as LLaMA-Factory's `CustomSeq2SeqTrainer` does."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        from llamafactory.train.trainer_utils import create_custom_scheduler

        create_custom_scheduler(self.args, num_training_steps, optimizer)
        return super().create_scheduler(num_training_steps, optimizer)


class OdbTrainer(OdbTrainerMixin, WithLlamaFactorysLengths):
    pass


class Rates(TrainerCallback):
    """The learning rate of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        self.rates.append(lr_scheduler.get_last_lr()[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_text_model(tmp_path_factory.mktemp("model")))


def arguments_of(output: Path, kind: str, kwargs: dict[str, Any], warmup: float, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": dict(kwargs),
        "warmup_steps": warmup,
        "learning_rate": 1e-3,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    return TrainingArguments(str(output), **(given | more))


def stock_rates(
    model: Any, output: Path, kind: str, kwargs: dict[str, Any], warmup: float
) -> tuple[list[float], Callable[[float], float]]:
    """(TOTAL + 1,) the rate before each step of a stock run with batches of one sample, and after the last.

    And the rate at any place between two steps, of stock's own function.
    """
    trainer = WithLlamaFactorysLengths(model=model, args=arguments_of(output, kind, kwargs, warmup))
    trainer.create_optimizer()
    scheduler = trainer.create_scheduler(TOTAL)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(TOTAL):
        trainer.optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates, lambda place: 1e-3 * scheduler.lr_lambdas[0](place)


def make_ours(model: Any, output: Path, arguments: TrainingArguments, eval_dataset: Any = None) -> OdbTrainer:
    torch.set_num_threads(1)
    return OdbTrainer(
        model=model,
        args=arguments,
        train_dataset=MaskedSamples(SIZE, 100),
        eval_dataset=eval_dataset,
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=700, depth=32),
        odb_audit=True,
    )


def handled_before_each_update(output: Path) -> list[int]:
    lines = [json.loads(line) for line in (output / "odb_audit.rank0.jsonl").read_text().splitlines()]
    handled = [0]
    for line in lines:
        handled.append(handled[-1] + len(line["indices"]))
    assert handled[-1] == TOTAL
    return handled


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("name", KINDS)
def test_the_rate_is_stocks_after_the_same_samples(model: Any, tmp_path: Path, name: str, warmup: str) -> None:
    kind, kwargs = KINDS[name]
    stock, stock_at = stock_rates(model, tmp_path / "stock", kind, kwargs, WARMUPS[warmup])
    arguments = arguments_of(tmp_path / "odb", kind, kwargs, WARMUPS[warmup], per_device_train_batch_size=16)
    trainer, watch = make_ours(model, tmp_path / "odb", arguments), Rates()
    trainer.add_callback(watch)
    trainer.train()
    handled = handled_before_each_update(tmp_path / "odb")
    ours = [*watch.rates, trainer.lr_scheduler.get_last_lr()[0]]
    assert len(ours) == len(handled) < TOTAL / 3, "fewer updates than stock's, or this shows nothing"
    assert arguments.lr_scheduler_kwargs == kwargs, "what the user gave must stay, for the next run"
    if (name, warmup) in BY_UPDATES:
        assert ours == pytest.approx(stock[: len(ours)])
    elif (name, warmup) in WARMUP_BY_SAMPLES_ONLY:
        check_warmup_by_samples_then_updates(ours, stock, handled)
    elif warmup == "3 updates" and name != "constant":
        assert ours[:4] == pytest.approx(stock[:4])
        rest = [(h - handled[3]) / (TOTAL - handled[3]) for h in handled[4:]]
        assert ours[4:] == pytest.approx([stock_at(3 + share * (TOTAL - 3)) for share in rest])
    else:
        assert ours == pytest.approx([stock[h] for h in handled])


def check_warmup_by_samples_then_updates(ours: list[float], stock: list[float], handled: list[int]) -> None:
    end = -(-TOTAL // 10)
    first = next(update for update, h in enumerate(handled) if h > end)
    assert ours[:first] == pytest.approx([stock[h] for h in handled[:first]])
    assert ours[first:] == pytest.approx(stock[end + 1 : end + 1 + len(ours) - first])


def test_every_kind_of_schedule_is_tried() -> None:
    assert {kind for kind, _ in KINDS.values()} | {"reduce_lr_on_plateau", "greedy"} == {k.value for k in SchedulerType}


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_schedules_of_what_is_measured_step_at_each_evaluation(model: Any, tmp_path: Path, kind: str) -> None:
    measured = {"eval_strategy": "epoch", "metric_for_best_model": "loss"}
    arguments = arguments_of(tmp_path, kind, {"patience": 0, "mode": "min", "factor": 0.5}, 0, **measured)
    trainer = make_ours(model, tmp_path, arguments, MaskedSamples(8, 100, seed=1))
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == EPOCHS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
            "num_decay_steps alone needs the number of updates.*; set max_steps, or num_stable_steps too",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_stable_steps": 3}},
            "num_stable_steps alone needs the number of updates.*; set max_steps, or num_decay_steps too",
        ),
    ],
)
def test_one_length_in_updates_beside_one_that_is_not_known_is_refused(
    model: Any, tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    given = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **arguments)
    with pytest.raises(ValueError, match=text):
        make_ours(model, tmp_path, given).train()
    given.max_steps = 4
    make_ours(model, tmp_path, given).train()


def test_a_warm_up_longer_than_the_run_is_named(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_ours(model, tmp_path, arguments_of(tmp_path, "linear", {}, 500))
    trainer.train()
    assert trainer.state.global_step < 500
    assert any("500 updates (warmup_steps) was not over" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["constant_with_warmup", "inverse_sqrt, timescale", "warmup_stable_decay"])
def test_a_resumed_run_has_the_rates_of_the_uninterrupted_one(model: Any, tmp_path: Path, kind: str) -> None:
    name, kwargs = KINDS[kind]
    whole, watch = make_ours(model, tmp_path / "a", arguments_of(tmp_path / "a", name, kwargs, 0.1)), Rates()
    whole.add_callback(watch)
    whole.train()
    stop = random.Random(kind).randrange(2, len(watch.rates) - 2)

    class StopThere(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                control.should_save = control.should_training_stop = True

    first = make_ours(model, tmp_path / "b", arguments_of(tmp_path / "b", name, kwargs, 0.1))
    first.add_callback(StopThere())
    first.train()
    rest, after = make_ours(model, tmp_path / "b", arguments_of(tmp_path / "b", name, kwargs, 0.1)), Rates()
    rest.add_callback(after)
    rest.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{stop}"))
    # the epoch's rest is grouped anew, so updates differ; the first rate is that at which the run stopped
    assert after.rates[0] == pytest.approx(watch.rates[stop])
    assert rest.odb_progress.handled == TOTAL
