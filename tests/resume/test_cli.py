"""`llamafactory-cli train` with `resume_from_checkpoint`: ZeRO-2 on two ranks, and DDP on two ranks, one, and two."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo import DemoPaths, make_demo
from tests.dist import kill
from tests.llamafactory.cli import DEADLINE, MARK, SCRIPTS, free_port, marked, train, wait_for_end, write
from tests.llamafactory.helpers import RECIPE
from tests.resume.runs import audit, emitted, state_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

SIZE = 36
EPOCHS = 2
ZERO2 = Path(__file__).resolve().parents[2] / "yaml_recipes" / "deepspeed" / "zero2.json"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return make_demo(tmp_path_factory.mktemp("demo") / "made", samples=SIZE)


@pytest.fixture
def recipe(demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return {
        **RECIPE,
        "model_name_or_path": str(demo.model),
        "dataset_dir": str(demo.data),
        "dataset": "odb_demo",
        "output_dir": str(tmp_path / "out"),
        "cutoff_len": 1024,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "odb": True,
        "odb_token_budget": 1280,
        "odb_depth": 16,
        "odb_audit": True,
        "odb_timeout": 60,
        "dataloader_num_workers": 1,
        "ddp_backend": "gloo",
    }


def train_and_kill(recipe: dict[str, Any], ranks: int, checkpoint: int) -> None:
    """Kill every process of the run at once as soon as a checkpoint is complete, as a power cut would."""
    path, mark = write(recipe), uuid.uuid4().hex
    env = {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", MARK: mark}
    env.update(FORCE_TORCHRUN="1", NPROC_PER_NODE=str(ranks), MASTER_PORT=str(free_port()))
    done = Path(recipe["output_dir"]) / f"checkpoint-{checkpoint}" / "trainer_state.json"
    command = [str(SCRIPTS / "llamafactory-cli"), "train", str(path)]
    log = path.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + DEADLINE
        while not done.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        while pids := list(marked(mark)):
            for pid in pids:
                kill(pid)
            time.sleep(0.1)
        process.wait()
    assert done.exists(), log.read_text()[-6000:]
    assert not wait_for_end(mark)


def whole(count: int = EPOCHS) -> dict[int, Counter[int]]:
    return {epoch: Counter(range(SIZE)) for epoch in range(count)}


def test_zero2_on_two_ranks_goes_on_after_a_power_cut(recipe: dict[str, Any]) -> None:
    recipe = {**recipe, "deepspeed": str(ZERO2)}
    output = Path(recipe["output_dir"])
    train_and_kill(recipe, 2, 2)
    assert 0 < state_of(output, 2)["progress"]["in_epoch"] < SIZE
    run = train({**recipe, "resume_from_checkpoint": str(output / "checkpoint-2")}, ranks=2)
    assert emitted(output) == whole()
    summary = run.json("odb_summary.json")
    assert (summary["samples"], summary["unique"], summary["repeated"]) == (EPOCHS * SIZE, SIZE, 0)
    assert "samples of epoch 1 are done; they are left out without being read" in run.log
    rates = run.history("learning_rate")
    assert rates == sorted(rates, reverse=True)
    assert run.json("trainer_state.json")["global_step"] == len({line["update"] for line in audit(output)})


def test_ddp_goes_from_two_ranks_to_one_and_back_to_two(recipe: dict[str, Any]) -> None:
    """The second start finds the checkpoint by itself, as LLaMA-Factory does where output_dir is not overwritten."""
    output = Path(recipe["output_dir"])
    train_and_kill({**recipe, "overwrite_output_dir": True}, 2, 2)
    first = state_of(output, 2)["progress"]
    train_and_kill({**recipe, "overwrite_output_dir": False, "odb_depth": 8}, 1, 6)
    second = state_of(output, 6)["progress"]
    assert second["emitted"] > first["emitted"]
    resume = {"overwrite_output_dir": False, "resume_from_checkpoint": str(output / "checkpoint-6")}
    run = train({**recipe, **resume}, ranks=2)
    assert emitted(output) == whole()
    summary = run.json("odb_summary.json")
    assert (summary["epochs"], summary["samples"], summary["repeated"]) == (EPOCHS, EPOCHS * SIZE, 0)
    updates = [line["update"] for line in audit(output)]
    assert set(updates) == set(range(1, max(updates) + 1))
