"""Runs `llamafactory-cli train` as a user would, with a deadline, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

TAG = "ODB_BENCHMARK_RUN"
"""Environment variable by which every process of a run is found, also those that torchrun gives their own session."""

ROOT = Path(__file__).resolve().parent.parent

KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36)}
"""The C library keeps what was freed (glibc), as torch's allocator does on a GPU. Otherwise each large tensor of a step
is mapped anew, and its pages cost more than the arithmetic on them: a padded token of a large micro-batch would be
dearer than one of a small one, where a GPU has it the other way round."""

OF_CPU_RUNS = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    *KEPT_MEMORY,
)
"""Environment variables that runs on CPUs set themselves."""

REPORT_SECONDS = 20.0
LEAVE_SECONDS = 10.0
"""How long processes may outlive the command."""


@dataclass(frozen=True)
class Finished:
    """A command that ended well."""

    wall_s: float
    first_step_s: float
    """From the start of the command to the end of its first optimizer step."""
    cpu_s: float
    """Processor time of all its processes."""
    others_share: float
    """Share of the machine's processor time that went to other programs meanwhile."""
    peak_rss_gib: float
    """Peak resident memory of its largest process."""
    left_behind: list[str]
    """Processes that had to be ended after it."""


@dataclass
class _Watch:
    """Follows LLaMA-Factory's `trainer_log.jsonl` and says how far the run is."""

    name: str
    log: Path
    start: float = field(default_factory=time.monotonic)
    first_step_s: float = 0.0
    _reported: float = 0.0

    def look(self) -> None:
        now = time.monotonic() - self.start
        steps = read_log(self.log)
        if steps and not self.first_step_s:
            self.first_step_s = now
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            done = "no step yet"
            if steps:
                last = steps[-1]
                done = f"step {last['current_steps']} of {last['total_steps']}, loss {last['loss']:.3f}"
            print(f"  {self.name}: {now:.0f} s, {done}", flush=True)


def train(
    recipe: Path,
    *,
    name: str,
    ranks: int,
    output_dir: Path,
    cache: Path,
    console: Path,
    deadline: float,
    driver: Sequence[str] = (),
    gpus: bool = False,
) -> Finished:
    """Run a recipe on `ranks` ranks, of CPUs if not said otherwise.

    Args:
        name: for messages.
        output_dir: the recipe's own.
        cache: directory for the data set cache, empty at first where runs are compared.
        console: file for the console output.
        deadline: seconds that it may take.
        driver: a module of this package and its arguments, which torchrun starts in place of LLaMA-Factory's own
            launcher; the recipe is its last argument.
        gpus: on the GPUs and with the caches, the threads and the meeting place that this process's environment says.

    Raises:
        BenchmarkError: it failed or was not done within `deadline` seconds; the end of its output is in the text.
    """
    tag = uuid.uuid4().hex
    bin_dir = Path(sys.executable).parent
    environment = _environment(tag, ranks, bin_dir, cache)
    if driver:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if gpus:
        environment = {name: value for name, value in environment.items() if name not in OF_CPU_RUNS}
        environment |= {name: os.environ[name] for name in OF_CPU_RUNS if name in os.environ}
    command = _command(recipe, driver, environment)
    busy = _busy_seconds()
    watch = _Watch(name, output_dir / "trainer_log.jsonl")
    with console.open("wb") as output, _cleared(tag) as left_behind:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        usage = None
        while usage is None:
            time.sleep(0.25)
            usage = _poll(process)
            watch.look()
            if usage is None and time.monotonic() - watch.start > deadline:
                raise BenchmarkError(f"{name} was not done within {deadline:.0f} s; its output is in {console}.")
        wall, busy = time.monotonic() - watch.start, _busy_seconds() - busy
        if process.returncode != 0:
            raise BenchmarkError(f"{name} ended with {process.returncode}; {console} ends with:\n{_tail(console)}")
    cpu = usage.ru_utime + usage.ru_stime
    others = max(0.0, busy - cpu) / (wall * (os.cpu_count() or 1))
    return Finished(wall, watch.first_step_s, cpu, others, usage.ru_maxrss / 2**20, left_behind)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a `trainer_log.jsonl` that hold a loss; none if it does not exist yet."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [row for row in map(json.loads, lines) if "loss" in row]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def available_gib() -> float:
    """Memory that new processes can have (GiB)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def _busy_seconds() -> float:
    """Processor time that the machine has spent on anything since it started."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _command(recipe: Path, driver: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    program = "torchrun" if driver else "llamafactory-cli"
    found = shutil.which(program, path=environment["PATH"])
    if found is None:
        raise BenchmarkError(f"{program} was not found beside this Python; install odb-factory in it.")
    if not driver:
        return [found, "train", str(recipe)]
    ranks, address, port = (environment[name] for name in ("NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
    torchrun = [found, "--nnodes=1", "--node_rank=0", f"--nproc_per_node={ranks}"]  # as LLaMA-Factory calls it
    return [*torchrun, f"--master_addr={address}", f"--master_port={port}", "--module", *driver, str(recipe)]


def _environment(tag: str, ranks: int, bin_dir: Path, cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        TAG: tag,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}",
        "FORCE_TORCHRUN": "1" if ranks > 1 else "0",  # one rank alone runs without it, as users start it
        "NPROC_PER_NODE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache),
        **KEPT_MEMORY,
    }


def _poll(process: subprocess.Popen[bytes]) -> Any:
    """Resource usage of the process and all it waited for, once it has ended; else None."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


@contextlib.contextmanager
def _cleared(tag: str) -> Iterator[list[str]]:
    """On leaving, end every process that carries `tag`; those found after a normal end are named in the list."""
    named: list[str] = []
    try:
        yield named
        end = time.monotonic() + LEAVE_SECONDS
        while _tagged(tag) and time.monotonic() < end:
            time.sleep(0.2)
        named.extend(f"{pid}: {text}" for pid, text in _tagged(tag).items())
    finally:
        for _ in range(100):  # again and again: one that is just being started shows up late
            living = _tagged(tag)
            if not living:
                break
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _tagged(tag: str) -> dict[int, str]:
    """Process ids and command lines of the living processes of a run."""
    mark = f"{TAG}={tag}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = text[:120]
    return found


def _tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
