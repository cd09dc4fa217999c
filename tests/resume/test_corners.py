"""Checkpoints at odd moments, runs that had ended, epochs that are cut: one rank, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from odb_factory.runtime.state import unpack_bits
from odb_factory.tools.demo.model import make_text_model
from tests.resume.runs import DROPPED, SIZE, Stage, audit, emitted, make_trainer, state_of

VALID = Counter(set(range(SIZE)) - DROPPED)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer_of(text_model: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(*callbacks: TrainerCallback, accumulation: int = 1, **arguments: Any) -> Any:
        stage = Stage(accumulation=accumulation, arguments={"save_strategy": "no", **arguments})
        trainer = make_trainer(stage, text_model, tmp_path, 1)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return make


class Stop(Exception):
    """Ends a run from within."""


class At(TrainerCallback):
    """Calls `action` at an event of the update that follows `updates`."""

    def __init__(self, event: str, updates: int, action: Callable[..., None]) -> None:
        def act(args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == updates:
                action(control)

        setattr(self, event, act)


def updates_of_first_epoch(make: Callable[..., Any], accumulation: int) -> int:
    trainer = make(accumulation=accumulation, num_train_epochs=1)
    trainer.train()
    return int(trainer.state.global_step)


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("last", [False, True], ids=["in the epoch", "in its last update"])
def test_a_checkpoint_within_an_update_does_not_count_what_is_not_in_the_weights(
    trainer_of: Callable[..., Any], tmp_path: Path, event: str, accumulation: int, last: bool
) -> None:
    """As transformers does on SIGTERM (enable_jit_checkpoint)."""
    updates = updates_of_first_epoch(trainer_of, accumulation) - 1 if last else 3

    def save_and_stop(control: Any) -> None:
        trainer._save_checkpoint(trainer.model, None)
        raise Stop

    trainer = trainer_of(At(event, updates, save_and_stop), accumulation=accumulation)
    with pytest.raises(Stop):
        trainer.train()
    state = state_of(tmp_path, updates)
    assert state["progress"]["updates"] == updates
    trained = {i for line in audit(tmp_path) if line["update"] <= updates for i in line["indices"]}
    done = unpack_bits(state["loader"]["done"], SIZE)
    assert state["loader"]["epoch"] == 0
    assert {i for i in range(SIZE) if done[i]} - DROPPED == trained
    other = trainer_of(accumulation=accumulation)
    other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{updates}"))
    assert emitted(tmp_path) == {0: VALID, 1: VALID}
    summary = other.odb_summary
    assert (summary["epochs"], summary["repeated"], summary["unique"]) == (2, 0, len(VALID))
    assert other.state.global_step == max(line["update"] for line in audit(tmp_path))


def test_a_trainer_that_failed_within_an_update_can_train_again(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    """What was pulled for that update must not be taken for what comes next."""
    seen: list[int] = []

    def fail(control: Any) -> None:
        if not seen:
            seen.append(1)
            raise Stop

    trainer = trainer_of(At("on_substep_end", 2, fail), accumulation=3, save_strategy="steps", save_steps=1)
    with pytest.raises(Stop):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert emitted(tmp_path) == {0: VALID, 1: VALID}


def test_stopping_at_a_substep_loses_nothing(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    """As LLaMA-Factory does on abort; the update that was open is not in the checkpoint."""

    def stop(control: Any) -> None:
        control.should_epoch_stop = control.should_training_stop = control.should_save = True

    trainer_of(At("on_substep_end", 2, stop), accumulation=3, save_strategy="epoch").train()
    trainer_of(accumulation=3).train(resume_from_checkpoint=True)
    assert emitted(tmp_path) == {0: VALID, 1: VALID}


@pytest.mark.parametrize("arguments", [{"num_train_epochs": 1.5}, {"max_steps": 6}, {"num_train_epochs": 1}], ids=str)
def test_a_run_that_had_ended_trains_no_more_and_keeps_its_summary(
    trainer_of: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    first = trainer_of(save_strategy="steps", save_steps=1, **arguments)
    first.train()
    again = trainer_of(**arguments)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == first.state.global_step
    timed = {"training_seconds", "data_wait", *(name for name in first.odb_summary if name.endswith("_per_second"))}
    assert again.odb_summary.keys() == first.odb_summary.keys()
    for name, value in first.odb_summary.items():
        # the time between the last checkpoint and the end is not in the checkpoint
        assert again.odb_summary[name] == (pytest.approx(value, rel=0.1, abs=0.01) if name in timed else value), name


def test_an_epoch_that_a_callback_cuts_counts_as_one(trainer_of: Callable[..., Any]) -> None:
    def cut(control: Any) -> None:
        control.should_epoch_stop = True

    trainer = trainer_of(At("on_step_end", 4, cut), num_train_epochs=2, lr_scheduler_type="linear")
    trainer.train()
    assert trainer.state.epoch == 2
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_an_epoch_of_which_only_bad_samples_are_left_ends_quietly(
    trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """The two samples that the data set drops are all that the state leaves."""
    import json

    from odb_factory.runtime.state import pack_bits

    trainer_of(max_steps=3, save_strategy="steps", save_steps=3).train()
    path = tmp_path / "checkpoint-3" / "odb_state.json"
    state = json.loads(path.read_text())
    state["loader"]["done"] = pack_bits(torch.tensor([i not in DROPPED for i in range(SIZE)]).numpy())
    state["loader"]["emitted"] = state["progress"]["in_epoch"] = len(VALID)
    path.write_text(json.dumps(state))
    trainer = trainer_of()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert emitted(tmp_path)[1] == VALID
    assert trainer.state.epoch == 2


def test_a_refused_epoch_does_not_lose_the_state_that_was_loaded() -> None:
    from odb_factory import OdbConfig, OdbDataLoader
    from odb_factory.runtime.state import StateError
    from tests.runtime.helpers import Lengths, PadCollate, collect

    data, config = Lengths([10] * 60), OdbConfig(token_budget=100, depth=8)
    with OdbDataLoader(data, PadCollate(), config) as loader:
        first: list[int] = []
        for _, info in loader:
            first += info.indices
            if info.step == 2:
                state = loader.state_dict()
                break
        loader.load_state_dict(state)
        loader.set_epoch(1)
        with pytest.raises(StateError):
            collect(loader)
        loader.set_epoch(0)
        assert sorted(first + [i for info in collect(loader) for i in info.indices]) == list(range(60))


def test_without_auto_commit_only_committed_steps_count() -> None:
    from odb_factory import OdbConfig, OdbDataLoader
    from tests.runtime.helpers import Lengths, PadCollate

    with OdbDataLoader(Lengths([10] * 60), PadCollate(), OdbConfig(token_budget=100, depth=8)) as loader:
        loader.auto_commit = False
        steps = iter(loader)
        handed: list[int] = []
        for number in range(4):
            handed += next(steps)[1].indices
            if number == 1:
                loader.commit()
                two = list(handed)
        assert {i for i, bit in enumerate(unpack_bits(loader.state_dict()["done"], 60)) if bit} == set(two)
        for _ in steps:
            pass
        assert loader.state_dict()["epoch"] == 0
        loader.commit()
        assert loader.state_dict()["epoch"] == 1
