"""What goes wrong on one rank reaches the consumer soon, says what and where, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from odb_factory import OdbConfig, OdbDataLoader, SampleMeta
from odb_factory.runtime.errors import CollateError, OdbError, SampleError
from tests.dist import alive, children, descendants, kill, run_ranks, session_members
from tests.runtime.helpers import (
    Lengths,
    PadCollate,
    all_of,
    collect,
    heavy_tail,
    open_files,
    run_epoch,
    wait_until,
)


def config(**values: Any) -> OdbConfig:
    return OdbConfig(**{"token_budget": 200, "depth": 16, "timeout": 60.0, **values})


def failure_of(loader: OdbDataLoader, kind: type[OdbError]) -> str:
    """Iterate until it fails, which must be soon; returns the text."""
    start = time.monotonic()
    with loader, pytest.raises(kind) as caught:
        collect(loader)
    assert time.monotonic() - start < 20
    return str(caught.value)


# --- exceptions in the user's code


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_the_data_set_is_shown_with_index_cause_and_traceback(workers: int) -> None:
    data = Lengths([10] * 60, fail={41})
    text = failure_of(OdbDataLoader(data, PadCollate(), config(), num_workers=workers), SampleError)
    assert "rank 0: sample 41 could not be read: KeyError: 'no key in sample 41'" in text
    assert "Traceback" in text
    assert "in __getitem__" in text
    assert "helpers.py" in text


def test_an_exception_in_the_collate_function_is_shown_with_samples_cause_and_traceback() -> None:
    data = Lengths([10] * 60)
    text = failure_of(OdbDataLoader(data, PadCollate(fail_on=33), config()), CollateError)
    assert "rank 0: the collate function failed on samples " in text
    assert " 33" in text
    assert "ZeroDivisionError: collate went wrong" in text
    assert "in __call__" in text


def test_a_batch_that_cannot_be_sent_is_an_error_of_the_collate_process() -> None:
    text = failure_of(OdbDataLoader(Lengths([10] * 9), lambda samples: lambda: samples, config()), CollateError)
    assert "pickle" in text
    assert "Traceback" in text


def _bad_init(worker: int) -> None:
    raise LookupError(f"no camera for worker {worker}")


def test_an_exception_in_worker_init_fn_is_shown() -> None:
    data = Lengths([10] * 20)
    text = failure_of(OdbDataLoader(data, PadCollate(), config(), num_workers=1, worker_init_fn=_bad_init), SampleError)
    assert "LookupError: no camera for worker 0" in text
    assert "in _bad_init" in text


def _bad_observe(index: int, sample: Any) -> SampleMeta:
    return SampleMeta(index=index, length=0, loss_tokens=0)


@pytest.mark.parametrize(
    ("observe", "cause"),
    [(_bad_observe, "empty: sample 0 has 0 tokens"), (lambda index, sample: None, "AttributeError|TypeError")],
)
def test_an_exception_in_observe_is_shown(observe: Any, cause: str) -> None:
    loader = OdbDataLoader(Lengths([10] * 20), PadCollate(), config(shuffle=False), observe=observe)
    with loader, pytest.raises(SampleError, match=rf"sample 0 could not be read: .*({cause})"):
        collect(loader)


class Quits(Lengths):
    """Ends the thread that reads, in the middle."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 17:
            sys.exit("enough")
        return super().__getitem__(index)


def test_a_data_set_that_calls_exit_is_an_error_not_a_hang() -> None:
    assert "SystemExit: enough" in failure_of(OdbDataLoader(Quits([10] * 40), PadCollate(), config()), SampleError)


def test_after_an_error_the_loader_can_be_used_again() -> None:
    class Once(Lengths):
        broken = True

        def __getitem__(self, index: int) -> dict[str, Any]:
            if self.broken and index == 20:
                raise OSError("network is down")
            return super().__getitem__(index)

    data = Once([10] * 40)
    with OdbDataLoader(data, PadCollate(), config()) as loader:
        with pytest.raises(SampleError, match="network is down"):
            collect(loader)
        data.broken = False
        assert all_of([run_epoch(loader, data)]) == list(range(40))


def test_an_exception_in_the_loop_ends_the_processes_when_the_iterator_is_dropped() -> None:
    loader = OdbDataLoader(Lengths(heavy_tail(200)), PadCollate(), config(), num_workers=1)

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError("in the model")

    with contextlib.suppress(ZeroDivisionError):
        train()
    assert wait_until(lambda: loader._session is None)


# --- killed processes


def test_a_killed_worker_is_an_error_soon() -> None:
    data = Lengths([10] * 400, sleep=0.02)
    with OdbDataLoader(data, PadCollate(), config(), num_workers=2) as loader:
        steps = iter(loader)
        next(steps)
        assert loader._session is not None
        workers = children(loader._session.process.pid)
        assert len(workers) == 2
        kill(workers[0])
        start = time.monotonic()
        with pytest.raises(SampleError, match=rf"(?s)rank 0: .*worker.*{workers[0]}.*exited unexpectedly"):
            collect_rest(steps)
        assert time.monotonic() - start < 20
        assert wait_until(lambda: not alive(workers[1]))


def collect_rest(steps: Any) -> None:
    for _ in steps:
        pass


@pytest.mark.parametrize(
    ("data", "collate", "phase"),
    [
        (Lengths([10] * 40, sleep=1.0), PadCollate(), r"reading samples for round \d of epoch 0"),
        (Lengths([10] * 400), PadCollate(sleep=0.2), r"collating the steps of round \d of epoch 0"),
    ],
    ids=["reading", "collating"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_collate_process_is_an_error_that_names_rank_and_phase(
    data: Lengths, collate: PadCollate, phase: str, workers: int
) -> None:
    with OdbDataLoader(data, collate, config(), num_workers=workers) as loader:
        steps = iter(loader)
        next(steps)
        assert loader._session is not None
        pid = loader._session.process.pid
        assert pid is not None
        below = descendants(pid)
        wait_until(lambda: loader._session is not None and phase.split()[0] in loader._session.phase)
        kill(pid)
        start = time.monotonic()
        with pytest.raises(CollateError, match=rf"rank 0: the collate process was killed by SIGKILL .*during: {phase}"):
            collect_rest(steps)
        assert time.monotonic() - start < 10
        assert len(below) == workers
        assert wait_until(lambda: not any(map(alive, below)), seconds=2.0), "its workers go with it"


def test_a_collate_process_killed_between_epochs_is_an_error_and_the_next_epoch_works() -> None:
    data = Lengths([10] * 40)
    with OdbDataLoader(data, PadCollate(), config()) as loader:
        run_epoch(loader, data)
        session = loader._session
        assert session is not None
        assert wait_until(lambda: session.phase == "waiting for the next epoch")
        kill(session.process.pid or 0)
        with pytest.raises(CollateError, match=r"killed by SIGKILL .* during: waiting for the next epoch"):
            collect(loader)
        assert all_of([run_epoch(loader, data)]) == list(range(40))


class Unborn(Lengths):
    """Cannot be rebuilt in another process."""

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    raise MemoryError("no room here")


def test_a_collate_process_that_does_not_come_up_is_an_error() -> None:
    loader = OdbDataLoader(Unborn([10] * 4), PadCollate(), config(start_method="spawn"))
    assert "the collate process ended with exit code 1 during: starting" in failure_of(loader, CollateError)


def test_a_stalled_data_set_is_an_error_after_the_timeout_that_names_the_phase() -> None:
    class Stalls(Lengths):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 30:
                time.sleep(600)
            return super().__getitem__(index)

    loader = OdbDataLoader(Stalls([10] * 40), PadCollate(), config(timeout=1.0, shuffle=False), num_workers=1)
    text = failure_of(loader, CollateError)
    assert "rank 0: nothing came from the collate process for 1 s (odb_timeout)" in text
    assert "reading samples for round" in text


@pytest.mark.parametrize("where", ["data set", "collate"])
def test_closing_does_not_wait_for_slow_user_code(where: str) -> None:
    data = Lengths([10] * 40, sleep=1000.0 if where == "data set" else 0.0)
    loader = OdbDataLoader(data, PadCollate(sleep=0.0 if where == "data set" else 1000.0), config(), num_workers=1)
    loader._session = session = loader._start()
    session.start_epoch(0)
    time.sleep(0.5)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 3
    assert session.process.exitcode == 0, "it left by itself"


# --- the end of the training process (in fresh processes; the harness checks that nothing is left of them)

_KEPT: list[Any] = []


def _end_without_closing(rank: int, world: int, how: str) -> int:
    data = Lengths(heavy_tail(100))
    loader = OdbDataLoader(data, PadCollate(), config(), num_workers=1)
    _KEPT.append(loader)
    if how == "between epochs":
        collect(loader)
    else:
        steps = iter(loader)
        next(steps)
        _KEPT.append(steps)
    assert loader._session is not None
    found = len(descendants())
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "forgotten":
        _KEPT.clear()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["between epochs", "in an epoch", "forgotten", "killed"])
def test_a_training_process_that_ends_without_closing_takes_all_along(how: str) -> None:
    [found] = run_ranks(1, _end_without_closing, how, init_group=False, may_die=[0] if how == "killed" else [])
    assert found == (None if how == "killed" else 2)


def _killed_beside_a_heir(rank: int, world: int, verdict: str) -> None:
    """The trainer is killed while another process has its end of the socket, so that the connection stays open."""
    loader = OdbDataLoader(Lengths(heavy_tail(100)), PadCollate(), config(), num_workers=1)
    next(iter(loader))
    loader._session = session = loader._start()
    found = descendants()
    if os.fork() == 0:
        gone = wait_until(lambda: not any(map(alive, found)), seconds=4.0)
        Path(verdict).write_text(f"{len(found)} {gone}")
        os._exit(0)
    assert session.process.is_alive()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
def test_the_death_of_the_training_process_is_noticed_even_if_the_connection_stays_open(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict"
    run_ranks(1, _killed_beside_a_heir, str(verdict), init_group=False, may_die=[0])
    assert verdict.read_text() == "1 True"


def _interrupt(rank: int, world: int, errors: str) -> tuple[int, int]:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = OdbDataLoader(Lengths(heavy_tail(500), sleep=0.01), PadCollate(), config(), num_workers=2)
    try:
        for _, info in loader:
            if info.step == 2:
                found = len(descendants())
                os.killpg(os.getpgrp(), signal.SIGINT)  # as the terminal does: the trainer, and all below it
    except KeyboardInterrupt:
        loader.close()
    return found, len(descendants())


@pytest.mark.distributed
def test_ctrl_c_ends_all_processes_without_a_word_of_theirs(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    assert run_ranks(1, _interrupt, str(errors), init_group=False) == [(3, 0)]
    assert errors.read_text() == ""


def _handle_interrupt(rank: int, world: int) -> tuple[int, int]:
    heard = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what the collate process and the workers inherit
    samples = 0
    with OdbDataLoader(Lengths(heavy_tail(200), sleep=0.005), PadCollate(), config(), num_workers=2) as loader:
        for _, info in loader:
            if info.step == 2:
                signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
                os.killpg(os.getpgrp(), signal.SIGINT)
            samples += info.samples
    return samples, len(heard)


@pytest.mark.distributed
def test_a_trainer_that_handles_ctrl_c_itself_can_go_on() -> None:
    assert run_ranks(1, _handle_interrupt, init_group=False) == [(200, 1)]


SCRIPT = """
import sys
from odb_factory import OdbDataLoader, OdbConfig
from tests.runtime.helpers import Lengths, PadCollate, heavy_tail
kept = []
for epochs in (1, 0):
    loader = OdbDataLoader(Lengths(heavy_tail(60)), PadCollate(), OdbConfig(token_budget=200), num_workers=1)
    for _ in range(epochs):
        for _ in loader: pass
    steps = iter(loader)
    next(steps)
    kept.append((loader, steps))
idle = OdbDataLoader(Lengths(heavy_tail(60)), PadCollate(), OdbConfig(token_budget=200))
for _ in idle: pass
print("partly printed", end="")
raise KeyError("the training failed")
"""


def test_an_interpreter_that_ends_with_an_error_does_not_hang() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=root, stdout=-1, stderr=-1, text=True, start_new_session=True
    )
    try:
        out, err = done.communicate(timeout=60)
        assert done.returncode == 1
        assert out == "partly printed", "and nothing is printed twice by a forked process"
        assert "KeyError: 'the training failed'" in err
        assert err.count("Traceback") == 1, err
        assert wait_until(lambda: not session_members(done.pid))
    finally:
        for pid in session_members(done.pid):
            kill(pid)


def test_leaving_early_many_times_leaks_neither_descriptors_nor_threads() -> None:
    import gc
    import threading

    def leave(count: int) -> None:
        for _ in range(count):
            for _ in loader:
                break

    data = Lengths(heavy_tail(50))
    with OdbDataLoader(data, PadCollate(), config()) as loader:
        leave(2)
        gc.collect()
        before = open_files(), threading.active_count()
        leave(10)
        gc.collect()
        assert (open_files(), threading.active_count()) == before
