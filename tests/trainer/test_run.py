"""What a Trainer's run shows and where it ends: schedule, epochs, progress, counts."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from odb_factory import DropSample, OdbConfig, OdbTrainerMixin
from odb_factory.runtime.errors import SampleError
from odb_factory.tools.demo.model import make_text_model
from tests.trainer.tiny import MaskedSamples, pad_collate

SIZE = 60


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


class WithDrops(MaskedSamples):
    """Every seventh sample is dropped."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index % 7 == 0:
            raise DropSample("seventh", f"number {index}")
        return super().__getitem__(index)


class Sleepy(MaskedSamples):
    """Takes its time, a different one in each run."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(random.SystemRandom().random() * 0.02)
        return super().__getitem__(index)


class Watch(TrainerCallback):
    """The learning rate after each update, and the state when training ends."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.totals: list[tuple[int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.totals.append((state.global_step, state.max_steps))

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        self.rates.append(lr_scheduler.get_last_lr()[0])


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def make_trainer(
    model_path: Path, output: Path, *, data: Any = None, eval_data: Any = None, budget: int = 120, **arguments: Any
) -> OdbTrainer:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {
        "learning_rate": 1e-3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 3,
    }
    return OdbTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        args=TrainingArguments(str(output), **(defaults | arguments)),
        train_dataset=data or MaskedSamples(SIZE, 100),
        eval_dataset=eval_data,
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=budget, depth=16),
        odb_audit=True,
    )


def audit_lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "odb_audit.rank0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("warmup", [0, 0.2, 3], ids=["no warm-up", "a fifth", "3 updates"])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_learning_rate_reaches_its_end_value(text_model: Path, tmp_path: Path, kind: str, warmup: float) -> None:
    trainer = make_trainer(text_model, tmp_path, lr_scheduler_type=kind, warmup_steps=warmup)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-6 * 1e-3)
    peak = max(watch.rates)
    top = watch.rates.index(peak)
    assert watch.rates[:top] == sorted(watch.rates[:top]), "the rate must only rise during warm-up"
    assert watch.rates[top:] == sorted(watch.rates[top:], reverse=True), "and only fall afterwards"
    if warmup == 3:
        assert watch.rates[:4] == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3, 1e-3])
    else:
        assert peak == pytest.approx(1e-3, rel=0.35)


def test_learning_rate_follows_the_samples(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, lr_scheduler_type="linear")
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    emitted, expected = 0, []
    for line in audit_lines(tmp_path):
        expected.append(1e-3 * (1 - emitted / (2 * SIZE)))
        emitted += len(line["indices"])
    assert watch.rates == pytest.approx(expected)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_epoch_is_every_sample_once_and_totals_are_true(text_model: Path, tmp_path: Path, accumulation: int) -> None:
    trainer = make_trainer(
        text_model, tmp_path, gradient_accumulation_steps=accumulation, include_num_input_tokens_seen="non_padding"
    )
    watch = Watch()
    trainer.add_callback(watch)
    result = trainer.train()
    lines = audit_lines(tmp_path)
    for epoch in (0, 1):
        assert sorted(i for line in lines if line["epoch"] == epoch for i in line["indices"]) == list(range(SIZE))
        assert sum(line["epoch"] == epoch for line in lines) % accumulation == 0
    assert trainer.state.global_step == len(lines) // accumulation == trainer.state.max_steps
    assert all(step < total for step, total in watch.totals[:-1]), "the run would have ended too early"
    assert watch.totals[-1][0] == watch.totals[-1][1]
    assert trainer.state.epoch == 2.0
    assert trainer.state.num_input_tokens_seen == sum(len(s["input_ids"]) for s in trainer.train_dataset.items) * 2
    seconds = result.metrics["train_runtime"]
    assert result.metrics["train_samples_per_second"] == pytest.approx(2 * SIZE / seconds, rel=0.01)
    summary = json.loads((tmp_path / "odb_summary.json").read_text())
    assert (summary["samples"], summary["unique"], summary["repeated"]) == (2 * SIZE, SIZE, 0)
    assert summary["steps"] == len(lines)
    assert summary["fillers"] == sum(line["idle"] for line in lines)
    assert summary["padded_tokens"] == sum(line["padded_tokens"] for line in lines)
    assert summary["tokens"] == sum(sum(line["lengths"]) for line in lines)
    assert summary["without_loss_tokens"] == sum(not line["idle"] and not line["loss_tokens"] for line in lines)


def test_progress_bar_ends_full(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, num_train_epochs=1)
    bars: list[tuple[int, int]] = []

    class Look(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                    bars.append((callback.training_bar.n, callback.training_bar.total))

    trainer.callback_handler.callbacks.insert(1, Look())
    trainer.train()
    assert bars == [(SIZE, SIZE)], "the bar counts samples"


def test_shares_of_the_run_are_shares_of_its_samples(text_model: Path, tmp_path: Path) -> None:
    """Whatever the estimate of the steps says meanwhile; and a run that is resumed goes on with them."""
    how = {"save_strategy": "steps", "save_steps": 0.25, "logging_steps": 0.1, "eval_steps": 0.5}
    how |= {"eval_strategy": "steps"}

    def run(output: Path, **more: Any) -> OdbTrainer:
        trainer = make_trainer(text_model, output, eval_data=MaskedSamples(4, 100), **how)
        trainer.train(**more)
        return trainer

    history = run(tmp_path).state.log_history
    shares = shares_done(tmp_path)
    for key, share in (("loss", 0.1), ("eval_loss", 0.5)):
        steps = [entry["step"] for entry in history if key in entry]
        assert steps == first_at(shares, share), key
    saved = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*"))
    assert saved == first_at(shares, 0.25)
    shutil.rmtree(tmp_path / f"checkpoint-{saved[-1]}")
    again = run(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved[1]}"))
    assert sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*")) == saved
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == first_at(shares, 0.1)


def test_a_run_that_is_resumed_with_steps_does_as_its_arguments_say(text_model: Path, tmp_path: Path) -> None:
    """After one that was given shares: what it left in the checkpoint must fit any other run, also a stock one."""
    trainer = make_trainer(text_model, tmp_path, save_strategy="steps", save_steps=0.2, logging_steps=0.1)
    trainer.train()
    first = min(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    state = json.loads((first / "trainer_state.json").read_text())
    assert 0 < state["logging_steps"] <= state["save_steps"] <= trainer.state.global_step
    start = int(first.name.split("-")[1])
    for path in set(tmp_path.glob("checkpoint-*")) - {first}:
        shutil.rmtree(path)
    again = make_trainer(text_model, tmp_path, save_strategy="steps", save_steps=3, logging_steps=2)
    again.train(resume_from_checkpoint=str(first))
    end = again.state.global_step
    logged = [entry["step"] for entry in again.state.log_history if "loss" in entry and entry["step"] > start]
    assert logged == [step for step in range(start + 1, end + 1) if step % 2 == 0]
    saved = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*"))
    assert saved == sorted({start, *(s for s in range(start + 1, end + 1) if s % 3 == 0), end})


def test_a_summary_that_cannot_be_written_does_not_cost_the_model(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "odb_summary.json").mkdir()
    trainer = make_trainer(text_model, tmp_path, num_train_epochs=1)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers.odb_factory").addHandler(handler)
    try:
        trainer.train()
    finally:
        logging.getLogger("transformers.odb_factory").removeHandler(handler)
    assert trainer.odb_summary["samples"] == SIZE
    assert [w for w in warnings if w.startswith("Online Dynamic Batching: no odb_summary.json (IsADirectoryError: ")]
    assert (tmp_path / "odb_report.png").exists()


def test_max_steps_says_nothing_of_epochs_that_will_not_be(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, max_steps=5)
    trainer.train()
    assert trainer.state.num_train_epochs == 1
    assert 0 < trainer.odb_summary["epochs"] < 1
    assert trainer.odb_summary["updates"] == 5


def shares_done(output: Path) -> list[float]:
    """For each update, the share of the run of two epochs that is done with it."""
    return [n / (2 * SIZE) for n in itertools.accumulate(len(line["indices"]) for line in audit_lines(output))]


def first_at(shares: list[float], share: float) -> list[int]:
    """The updates (1-based) that reach another multiple of `share`."""
    parts = [0, *(int(done / share + 1e-9) for done in shares)]
    return [update for update in range(1, len(parts)) if parts[update] > parts[update - 1]]


def test_half_an_epoch_stops_at_half_the_samples(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, num_train_epochs=0.5)
    trainer.train()
    emitted = [len(line["indices"]) for line in audit_lines(tmp_path)]
    assert sum(emitted) >= SIZE / 2 > sum(emitted[:-1])
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_max_steps_counts_steps_over_several_epochs(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, max_steps=25, lr_scheduler_type="linear")
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.state.global_step == 25
    assert watch.rates == pytest.approx([1e-3 * (1 - step / 25) for step in range(25)])
    lines = audit_lines(tmp_path)
    assert len(lines) == 25
    assert lines[-1]["epoch"] >= 1
    assert sorted(i for line in lines if line["epoch"] == 0 for i in line["indices"]) == list(range(SIZE))


def test_dropped_samples_are_counted_and_named_and_the_rate_still_ends_at_zero(
    text_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(text_model, tmp_path, data=WithDrops(SIZE, 100), num_train_epochs=1)
    trainer.train()
    summary = json.loads((tmp_path / "odb_summary.json").read_text())
    dropped = [i for i in range(SIZE) if i % 7 == 0]
    assert summary["dropped"] == {"seventh": len(dropped)}
    assert [d["index"] for d in summary["dropped_samples"]] == dropped
    assert summary["samples"] == summary["unique"] == SIZE - len(dropped)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_evaluation_keeps_the_stock_loader(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, num_train_epochs=1, per_device_eval_batch_size=6)
    trainer.eval_dataset = MaskedSamples(6, 100, seed=1)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert math.isfinite(before)
    assert after < before


def test_same_seed_gives_the_same_audit_and_another_seed_does_not(text_model: Path, tmp_path: Path) -> None:
    runs = (("a", 3, 0, MaskedSamples), ("b", 3, 2, MaskedSamples), ("c", 3, 2, Sleepy), ("d", 4, 0, MaskedSamples))
    audits = []
    for name, seed, workers, kind in runs:
        data = kind(SIZE, 100)
        make_trainer(text_model, tmp_path / name, data=data, seed=seed, dataloader_num_workers=workers).train()
        audits.append((tmp_path / name / "odb_audit.rank0.jsonl").read_text())
    assert audits[0] == audits[1] == audits[2]
    assert audits[0] != audits[3]


class AllBad(MaskedSamples):
    """No sample is usable."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        raise DropSample("unusable")


class OneBroken(MaskedSamples):
    """Sample 17 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == 17:
            raise OSError("no such file: 17.png")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (AllBad(8, 100), SampleError, r"all 8 samples of this epoch were dropped.*sample \d \(unusable\)"),
        (OneBroken(30, 100), SampleError, r"sample 17 could not be read: OSError: no such file: 17.png"),
    ],
)
def test_unusable_data_ends_the_run_with_its_reason(
    text_model: Path, tmp_path: Path, data: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_trainer(text_model, tmp_path, data=data).train()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
    ],
)
def test_contradicting_arguments_are_refused(
    text_model: Path, tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make_trainer(text_model, tmp_path, **arguments)
