"""Subprocesses that return an answer: always with a deadline, and ended with all their children afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "ODB_DOCTOR "
"""The prefix of the line with a probe's answer, since the libraries that it imports may print, too."""


class ProbeError(RuntimeError):
    """A process gave no answer; the message says why, in one line."""


def answer(value: Any) -> None:
    """In a probe: print the answer (any JSON value)."""
    print(f"\n{MARK}{json.dumps(value)}", flush=True)


class Processes:
    """Starts processes and ends them; `close`, from any thread, ends those that are still running."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, command: Sequence[str], environ: Mapping[str, str], deadline: float) -> Any:
        """Run a command and return its answer (see `answer`).

        Raises:
            ProbeError: it could not be started, failed, gave no answer or took longer than `deadline` seconds.
        """
        try:
            process = self._start(command, environ)
        except OSError as error:
            raise ProbeError(f"{command[0]} cannot be started: {error}") from error
        try:
            out, err = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"no answer within {deadline:g} s") from None
        finally:
            self._end(process)
        lines = [line for line in out.splitlines() if line.startswith(MARK)]
        if process.returncode or not lines:
            raise ProbeError(_last_words(process.returncode, err))
        return json.loads(lines[-1].removeprefix(MARK))

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._closed:
                raise ProbeError("the doctor was interrupted")
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # its own process group, to be killed as a whole
            )
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """End all running processes; no more can be started."""
        with self._lock:
            self._closed = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _last_words(code: int, err: str) -> str:
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    ended = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"{ended}: {lines[-1]}" if lines else f"{ended}, without a message"
