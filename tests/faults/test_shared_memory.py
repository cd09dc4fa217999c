"""A small and a full `/dev/shm`, in a mount namespace of its own (few descriptors: tests/runtime/test_resources.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).resolve().parents[2]

MOUNT = "mount -t tmpfs -o size=64m none /dev/shm"

SCRIPT = """
import contextlib, shutil, sys

import torch

from odb_factory import OdbConfig, OdbDataLoader
from tests import conftest
from tests.dist import RankFailure, run_ranks
from tests.runtime.helpers import Lengths, PadCollate, check_world, run_epoch

class Wide(Lengths):
    "With input_ids and labels 6 tensors a sample, 64 KB together: a window takes as much as all of /dev/shm."
    def __getitem__(self, index):
        return super().__getitem__(index) | {f"wide{i}": torch.zeros(4096) for i in range(4)}

def rank_main(rank, world, workers, size):
    data = Wide([20] * size)
    config = OdbConfig(token_budget=400, depth=1024, ramp=False, timeout=60.0)
    with OdbDataLoader(data, PadCollate(), config, num_workers=workers) as loader:
        return run_epoch(loader, data)

def report(name, world, workers, size):
    try:
        ranks = run_ranks(world, rank_main, workers, size, deadline=60.0, init_group=world > 1)
        check_world(ranks, Lengths([20] * size))
        print(name, "every index once", flush=True)
    except RankFailure as failure:
        print(name, *str(failure).splitlines(), sep=" / ", flush=True)

def fill(leave):
    "Fill /dev/shm up to so many bytes."
    with open("/dev/shm/fill", "ab") as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage("/dev/shm").free - leave) > 0:
            file.write(bytes(min(free, 2**20)))
            file.flush()

if __name__ == "__main__":
    assert shutil.disk_usage("/dev/shm").total == 64 * 2**20
    # room for the semaphores of Python's own queues, without which no program has workers
    fill(leave=256 * 1024)
    report("nearly full, 2 ranks, 2 workers:", 2, 2, 2600)
    fill(leave=0)
    report("full, no workers:", 1, 0, 1300)
    report("full, 1 worker:", 1, 1, 50)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script above says, run where `/dev/shm` has 64 MB."""
    if subprocess.run(["unshare", "-rm", "sh", "-c", MOUNT], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount namespace")
    script = tmp_path_factory.mktemp("shm") / "deep.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", f'{MOUNT} && exec "$@"', "sh", sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=110)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, text
    return text


@pytest.mark.parametrize("name", ["nearly full, 2 ranks, 2 workers:", "full, no workers:"])
def test_a_window_of_1024_samples_needs_no_room_in_dev_shm(name: str, said: str) -> None:
    assert f"{name} every index once" in said.splitlines()


def test_workers_without_any_room_for_their_queues_are_a_clear_error_not_a_hang(said: str) -> None:
    [line] = [line for line in said.splitlines() if line.startswith("full, 1 worker:")]
    assert "SampleError: rank 0: reading failed: OSError: [Errno 28] No space left on device" in line
