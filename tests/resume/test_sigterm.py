"""SIGTERM to every process of `llamafactory-cli train`, as torchrun, Slurm and Kubernetes send it."""

from __future__ import annotations

import os
import re
import signal
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
from tests.resume.runs import emitted, state_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

SIZE = 24


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
        "num_train_epochs": 400,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "enable_jit_checkpoint": True,
        "odb": True,
        "odb_token_budget": 1280,
        "odb_depth": 8,
        "odb_audit": True,
        "odb_timeout": 60,
        "dataloader_num_workers": 1,
    }


def train_and_terminate(recipe: dict[str, Any], ranks: int) -> tuple[int, str]:
    """The exit code and the log of a run that gets SIGTERM, in each process of it, after some updates."""
    path, mark = write(recipe), uuid.uuid4().hex
    env = {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", MARK: mark}
    if ranks > 1:
        env.update(FORCE_TORCHRUN="1", NPROC_PER_NODE=str(ranks), MASTER_PORT=str(free_port()))
    log, lines = path.with_suffix(".log"), Path(recipe["output_dir"]) / "trainer_log.jsonl"
    command = [str(SCRIPTS / "llamafactory-cli"), "train", str(path)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + DEADLINE
        while not (lines.exists() and lines.read_text().count("\n") > 3) and time.monotonic() < end:
            assert process.poll() is None, log.read_text()[-6000:]
            time.sleep(0.1)
        for pid in list(marked(mark)):
            kill(pid, signal.SIGTERM)
        try:
            code = process.wait(90)
        except subprocess.TimeoutExpired:
            code = -1
        left = wait_for_end(mark)
        for pid in list(marked(mark)):
            kill(pid)
        process.wait()
    text = log.read_text(errors="replace")
    assert not left, f"left behind: {left}\n{text[-6000:]}"
    return code, text


@pytest.mark.parametrize("odb", [False, True], ids=["stock", "odb"])
def test_one_rank_writes_a_checkpoint_and_ends_well(recipe: dict[str, Any], odb: bool) -> None:
    recipe["odb"] = odb
    if not odb:
        recipe["dataloader_num_workers"] = 0  # stock's own workers die of the signal, and the run of that
    code, log = train_and_terminate(recipe, 1)
    assert code == 0, log[-6000:]
    (checkpoint,) = Path(recipe["output_dir"]).glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").exists()
    assert not (checkpoint / "checkpoint-is-incomplete.txt").exists()
    if odb:
        check_resumed(recipe, checkpoint, ranks=1)


def test_two_ranks_write_one_checkpoint_and_resume(recipe: dict[str, Any]) -> None:
    recipe["ddp_backend"] = "gloo"
    _, log = train_and_terminate(recipe, 2)  # torchrun itself ends with an error, since it got a signal
    (checkpoint,) = Path(recipe["output_dir"]).glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").exists(), log[-6000:]
    assert not (checkpoint / "checkpoint-is-incomplete.txt").exists()
    assert not {"CollateError", "ExchangeError", "SampleError"} & set(re.findall(r"\w+Error", log)), log[-6000:]
    assert (Path(recipe["output_dir"]) / "odb_summary.json").exists(), "the run was ended, not broken off"
    check_resumed(recipe, checkpoint, ranks=2)


def check_resumed(recipe: dict[str, Any], checkpoint: Path, ranks: int) -> None:
    """The rest of the epoch, and one more, come exactly once."""
    output = Path(recipe["output_dir"])
    epochs = int(state_of(output, int(checkpoint.name.split("-")[1]))["loader"]["epoch"]) + 2
    train({**recipe, "num_train_epochs": epochs, "resume_from_checkpoint": str(checkpoint)}, ranks=ranks)
    assert emitted(output) == {epoch: Counter(range(SIZE)) for epoch in range(epochs)}
