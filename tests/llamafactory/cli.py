"""Runs `llamafactory-cli train` as a user does, in processes of its own that are all gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.dist import describe

MARK = "ODB_TEST_RUN"
"""Environment variable that all processes of one run inherit, also those that start sessions of their own."""

DEADLINE = 240.0
"""Seconds for a command. It takes some ten, and several times that on cores that are busy with other things."""

LEAVE_SECONDS = 10.0
"""How long processes of a run may outlive the command."""


@dataclass(frozen=True)
class Finished:
    """A run that ended well."""

    output: Path
    log: str

    def json(self, name: str) -> Any:
        return json.loads((self.output / name).read_text(encoding="utf-8"))

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.output / name).read_text(encoding="utf-8").splitlines()]

    def audit(self, rank: int = 0) -> list[dict[str, Any]]:
        return self.lines(f"odb_audit.rank{rank}.jsonl")

    def history(self, key: str) -> list[Any]:
        """The values of `key` in the trainer's log, in order."""
        return [entry[key] for entry in self.json("trainer_state.json")["log_history"] if key in entry]

    def files(self) -> set[str]:
        return {str(p.relative_to(self.output)) for p in self.output.rglob("*") if p.is_file()}


def train(recipe: dict[str, Any], *, ranks: int = 1, **environment: str) -> Finished:
    """`llamafactory-cli train` of a recipe, with torchrun for several ranks.

    Raises:
        AssertionError: it failed, took too long or left processes behind; the text ends with its log.
    """
    path = write(recipe)
    if ranks > 1:
        environment.update(FORCE_TORCHRUN="1", NPROC_PER_NODE=str(ranks), MASTER_PORT=str(free_port()))
    log = launch([str(SCRIPTS / "llamafactory-cli"), "train", str(path)], path.with_suffix(".log"), environment)
    return Finished(Path(recipe["output_dir"]), log)


def train_in_turn(recipes: Sequence[dict[str, Any]]) -> list[Finished | str]:
    """The same for several recipes in one process, which saves importing; a failed run gives its log."""
    paths = [write(recipe) for recipe in recipes]
    log = launch([sys.executable, "-c", IN_TURN, *map(str, paths)], paths[0].with_suffix(".log"), {})
    parts = log.split(BETWEEN)[1:]
    assert len(parts) == len(recipes), log[-6000:]
    return [
        Finished(Path(recipe["output_dir"]), part) if part.startswith(" done") else part
        for recipe, part in zip(recipes, parts, strict=True)
    ]


SCRIPTS = Path(sys.executable).parent
BETWEEN = "=== run"
IN_TURN = f"""
import contextlib, io, sys, traceback
from llamafactory.cli import main

for path in sys.argv[1:]:
    sys.argv, result, log = ["llamafactory-cli", "train", path], "done", io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            main()
        except BaseException:
            traceback.print_exc()
            result = "failed"
    print("{BETWEEN}", result, log.getvalue(), flush=True)
"""


def write(recipe: dict[str, Any]) -> Path:
    """Write a recipe beside its output directory."""
    path = Path(recipe["output_dir"]).with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def launch(command: list[str], log: Path, environment: dict[str, str]) -> str:
    """Run a command in a session of its own, with a deadline; returns its output."""
    mark = uuid.uuid4().hex
    env = {
        **os.environ,
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        MARK: mark,
        **environment,
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        left: list[str] = []
        try:
            code: int | None = process.wait(DEADLINE)
            left = wait_for_end(mark)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    assert code is not None, f"not done within {DEADLINE} s\n{text[-4000:]}"
    assert code == 0, f"exit code {code}\n{text[-6000:]}"
    assert not left, f"left behind: {left}"
    return text


def wait_for_end(mark: str) -> list[str]:
    """What still lives of a run some seconds later."""
    end = time.monotonic() + LEAVE_SECONDS
    while (pids := list(marked(mark))) and time.monotonic() < end:
        time.sleep(0.1)
    return [describe(pid) for pid in pids]


def marked(mark: str) -> Iterator[int]:
    """Living processes of a run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
