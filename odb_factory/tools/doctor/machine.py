"""The machine that the checks examine, as a training run would see it; tests replace parts of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from odb_factory.tools.doctor.process import ProbeError, Processes

DEADLINE = 150.0
"""Seconds for a probe. It takes about ten, and far more if the packages are on a slow network disk."""

AT_ONCE = 2
"""Probes that run at the same time: each takes up to a gigabyte of memory."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Like a command installed by pip, a probe must not import from the current folder."""

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
"""Set for the ranks of a run; removed for probes."""


@dataclass(frozen=True)
class Machine:
    """A context manager; on exit, it ends processes that are still running."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    """The interpreter whose packages are checked."""
    shared_memory: Path = Path("/dev/shm")
    devices: Path = Path("/dev")
    control_groups: Path = Path("/sys/fs/cgroup")
    odb_port: int = 0
    """The recipe's `odb_port`; 0: any free one."""

    _processes: Processes = field(default_factory=Processes, init=False)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE), init=False)
    _probes: dict[str, Future[Any]] = field(default_factory=dict, init=False)

    def ask(self, code: str, python: str | None = None, deadline: float = 30.0) -> Any:
        """Run `code` in a fresh Python with this environment, and return its answer (see `process.MARK`).

        Raises:
            ProbeError: there is no answer.
        """
        return self._processes.ask([python or self.python, "-c", code], {**self.environ, **SAFE_PATH}, deadline)

    def start(self, probes: Collection[str]) -> None:
        """Start probes in the background, a few at a time, in this order."""
        for name in probes:
            if name not in self._probes:
                self._probes[name] = self._pool.submit(self._run, name)

    def probe(self, name: str) -> Any:
        """The answer of the module `odb_factory.tools.doctor.probes.<name>`; it runs only once.

        Raises:
            ProbeError: there is no answer.
        """
        self.start([name])
        while True:  # with a timeout: Ctrl-C does not end a wait if another thread gets the signal
            done, _ = wait([self._probes[name]], timeout=0.5)
            if done:
                return self._probes[name].result()

    def _run(self, name: str) -> Any:
        environ = {key: value for key, value in self.environ.items() if key not in LAUNCHER_VARIABLES}
        command = [self.python, "-m", f"odb_factory.tools.doctor.probes.{name}", str(self.odb_port)]
        return self._processes.ask(command, {**environ, **SAFE_PATH}, DEADLINE)

    def close(self) -> None:
        """End processes that are still running."""
        self._processes.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Machine", "ProbeError"]
