"""Trainer runs that stop in one way or another, and go on in another world: what the tests of resumption share."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dist import run_ranks
from tests.trainer.tiny import MaskedSamples, free_port, launch_like_torchrun, pad_collate

SIZE = 60
EPOCHS = 2
DROPPED = frozenset({7, 31})


@dataclass(frozen=True)
class Stage:
    """One start of the program."""

    world: int = 1
    stop: str = "end"
    """`end`: runs to its end; `clean`, `kill` (SIGKILL) or `raise` after update `at`, which comes after a save."""
    at: int = 0
    resume: int | None = None
    """Go on from `checkpoint-{resume}`; 0: from the last one there is."""
    depth: int = 16
    accumulation: int = 1
    samples_per_update: int | None = None
    budget: int = 120
    workers: int = 0
    assignment: str = "shared"
    arguments: dict[str, Any] = field(default_factory=dict)


class Logged(MaskedSamples):
    """Writes down which index was read, in whatever process; drops two samples."""

    def __init__(self, log: Path) -> None:
        super().__init__(SIZE, 100)
        self.log = log

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        if index in DROPPED:
            from odb_factory import DropSample

            raise DropSample("unwanted", f"number {index}")
        return super().__getitem__(index)


def run(stage: Stage, model: Path, output: Path, *, deadline: float = 60.0) -> list[Any]:
    """Run a stage to its end; returns each rank's result, None of a rank that was killed."""
    (output / "reads.txt").unlink(missing_ok=True)
    may_die = [0] if stage.stop == "kill" else []
    return run_ranks(
        stage.world, _train, stage, model, output, free_port(), init_group=False, may_die=may_die, deadline=deadline
    )


def _train(rank: int, world: int, stage: Stage, model_path: Path, output: Path, port: int) -> Any:
    launch_like_torchrun(rank, world, port) if world > 1 else None
    import torch

    torch.set_num_threads(1)
    trainer = make_trainer(stage, model_path, output, world)
    trainer.add_callback(_stopper(stage, rank))
    rates: list[float] = []
    trainer.add_callback(_rates(rates))
    resume: Any = None
    if stage.resume is not None:
        resume = str(output / f"checkpoint-{stage.resume}") if stage.resume else True
    try:
        trainer.train(resume_from_checkpoint=resume)
    except _Wanted:
        return "raised"
    except Exception as error:
        if stage.stop != "kill":
            raise
        return f"{type(error).__name__}: {error}"
    return {"summary": trainer.odb_summary, "rates": rates, "step": trainer.state.global_step, "seen": _seen(trainer)}


def _seen(trainer: Any) -> dict[str, Any]:
    state = trainer.state
    return {"epoch": state.epoch, "max_steps": state.max_steps, "tokens": state.num_input_tokens_seen}


def make_trainer(stage: Stage, model_path: Path, output: Path, world: int) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from odb_factory import OdbConfig, OdbTrainerMixin

    class OdbTrainer(OdbTrainerMixin, Trainer):
        pass

    values: dict[str, Any] = {
        "learning_rate": 1e-3,
        "num_train_epochs": EPOCHS,
        "gradient_accumulation_steps": stage.accumulation,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_num_workers": stage.workers,
        "ddp_backend": "gloo" if world > 1 else None,
        "include_num_input_tokens_seen": "non_padding",
    }
    return OdbTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        args=TrainingArguments(str(output), **(values | stage.arguments)),
        train_dataset=Logged(output / "reads.txt"),
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=stage.budget, depth=stage.depth, timeout=30.0, assignment=stage.assignment),
        odb_samples_per_update=stage.samples_per_update,
        odb_audit=True,
    )


class _Wanted(Exception):
    """What a stage with `stop: raise` raises."""


def _stopper(stage: Stage, rank: int) -> Any:
    from transformers import TrainerCallback

    class Stopper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stage.stop == "clean" and state.global_step == stage.at:
                control.should_training_stop = True

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._strike(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._strike(state.global_step)

        def _strike(self, updates: int) -> None:
            """In the middle of the update that follows `at`: it is lost with what it trained."""
            if updates == stage.at and stage.stop == "raise":
                raise _Wanted
            if updates == stage.at and stage.stop == "kill" and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return Stopper()


def _rates(rates: list[float]) -> Any:
    from transformers import TrainerCallback

    class Rates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
            rates.append(lr_scheduler.get_last_lr()[0])

    return Rates()


# --- what is looked at afterwards


def audit(output: Path) -> list[dict[str, Any]]:
    """The lines of all ranks' audits."""
    lines = []
    for path in sorted(output.glob("odb_audit.rank*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines


def emitted(output: Path) -> dict[int, Counter[int]]:
    """How often each index was trained on, by epoch, over all ranks."""
    found: dict[int, Counter[int]] = {}
    for line in audit(output):
        found.setdefault(line["epoch"], Counter()).update(line["indices"])
    return found


def reads(output: Path) -> list[int]:
    """The indices that the last stage read, in all processes."""
    return [int(line) for line in (output / "reads.txt").read_text().split()]


def checkpoints(output: Path) -> list[int]:
    """The updates after which there is a checkpoint."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in output.glob("checkpoint-*"))


def state_of(output: Path, checkpoint: int) -> dict[str, Any]:
    """What was saved of the samples beside a checkpoint."""
    state: dict[str, Any] = json.loads((output / f"checkpoint-{checkpoint}" / "odb_state.json").read_text())
    return state
