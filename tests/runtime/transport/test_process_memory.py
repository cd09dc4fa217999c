"""Reading another process's memory, and what happens where that is forbidden or the process is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import session
from odb_factory.runtime.allocation import HUGE_PAGE
from odb_factory.runtime.messages import Stop
from odb_factory.runtime.serialise import LARGE
from odb_factory.runtime.transport import batches, process_memory
from odb_factory.runtime.transport.batches import BatchSender, Offer, Received, StopRequested
from odb_factory.runtime.transport.process_memory import ProcessGoneError, ReadForbiddenError, read, spans_of
from odb_factory.runtime.transport.samples import Chunk, SampleReceiver, WorkerStatus
from tests.runtime.helpers import Lengths, PadCollate, open_files, wait_until


@pytest.fixture
def child() -> Iterator[int]:
    """A process with a copy of this one's memory, that does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a stricter `ptrace_scope`; processes that are forked now see it too."""

    def refuse(*args: Any) -> int:
        process_memory.ctypes.set_errno(process_memory.errno.EPERM)
        return -1

    monkeypatch.setattr(process_memory, "_readv", refuse)


def test_what_lies_in_another_process_arrives_and_is_not_what_lies_here() -> None:
    parts = [np.arange(size, dtype=np.uint8) for size in (1, 4096, 3 * HUGE_PAGE + 5)] * 700  # more than one call takes
    pid = os.fork()
    if pid == 0:
        signal.pause()
    spans = spans_of(parts[:3]) * 700
    for part in parts[:3]:
        part[:] = 0  # here, and not there
    try:
        got = read(pid, spans[:2000:3] + spans[1:2000:3] + spans[2:3])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [len(block) for block in got] == [1] * 667 + [4096] * 667 + [3 * HUGE_PAGE + 5]
    assert all(bytes(block) == bytes(range(256)) * 16 for block in got[667:-1])
    assert np.array_equal(np.frombuffer(got[-1], np.uint8), np.arange(3 * HUGE_PAGE + 5, dtype=np.uint8))


def test_a_process_that_has_ended_is_gone_and_no_other_memory_is_read(child: int) -> None:
    spans = spans_of([np.ones(100, np.uint8)])
    assert bytes(read(child, [(spans[0][0], 4)])[0]) != b""
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    with pytest.raises(ProcessGoneError):
        read(child, spans)


def test_memory_that_is_not_there_is_an_error(child: int) -> None:
    with pytest.raises(OSError, match="Bad address"):
        read(child, [(8, 100)])


def test_a_refusal_is_no_other_error(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    with pytest.raises(ReadForbiddenError):
        read(child, spans_of([np.ones(100, np.uint8)]))
    monkeypatch.setattr(process_memory, "_readv", None)
    with pytest.raises(ReadForbiddenError):
        read(child, spans_of([np.ones(100, np.uint8)]))


# --- the whole way, both ways


class Wide(Lengths):
    """Samples with a tensor that lies beside the pickle."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "pixels": torch.full((LARGE,), index, dtype=torch.float32)}


class StackPixels(PadCollate):
    """Pads, and puts all pixels one after the other; writes into its samples afterwards."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(samples)
        batch["pixels"] = torch.stack([sample["pixels"] for sample in samples])
        for sample in samples:
            sample["pixels"].fill_(-1)
        return batch


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_and_batches_arrive_whole_with_and_without_reading_of_memory(
    workers: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not allowed:
        forbid(monkeypatch)
    data = Wide([4 + i % 30 for i in range(150)])
    files = open_files()
    kept, copied = [], []

    def note(*args: Any) -> Any:
        result = batches.accept(*args)
        copied.append(result[0].done)
        return result

    monkeypatch.setattr(session, "accept", note)
    with OdbDataLoader(data, StackPixels(), OdbConfig(token_budget=100, depth=40), num_workers=workers) as loader:
        for batch, info in loader:
            assert batch["pixels"][:, 0].tolist() == list(info.indices)
            assert (batch["pixels"] == batch["pixels"][:, :1]).all()
            batch["pixels"] += 1000.0  # the consumer's own, for as long as it likes
            kept.append((batch["pixels"], info.indices))
            assert "/dev/shm/torch_" not in Path("/proc/self/maps").read_text()
    assert copied == ([True] * len(kept) if allowed else [False]), "and it was the way that it should be"
    for pixels, indices in kept:
        assert pixels[:, -1].tolist() == [1000.0 + index for index in indices]
    assert sorted(index for _, indices in kept for index in indices) == list(range(150))
    assert open_files() == files


def test_bytes_of_a_window_are_the_same_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """They bound the window, so they must not depend on what the system allows."""

    def windows(workers: int) -> list[int]:
        config = OdbConfig(token_budget=100, depth=40, window_bytes=3_000_000)
        with OdbDataLoader(Wide([5] * 60), PadCollate(), config, num_workers=workers) as loader:
            return [info.window_bytes for _, info in loader]

    first = windows(0)
    assert max(first) > 2_500_000
    assert windows(2) == first
    forbid(monkeypatch)
    assert windows(2) == first


def test_fillers_are_not_what_the_collate_function_left_of_them() -> None:
    data = Wide([5, 90, 90, 90])
    config = OdbConfig(token_budget=100, depth=4, steps_multiple=8)
    with OdbDataLoader(data, StackPixels(), config, num_workers=1) as loader:
        fillers = [batch for batch, info in loader if info.idle]
    assert len(fillers) == 4
    assert all((batch["pixels"] == 0).all() for batch in fillers)


def test_a_sender_that_is_refused_sends_it_all_and_offers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    answers = [Received(False)]
    monkeypatch.setattr(batches, "send", lambda sock, message: sent.append(message))
    monkeypatch.setattr(batches, "send_parts", lambda sock, parts: sent.append(len(parts)))
    monkeypatch.setattr(batches, "receive", lambda sock: answers.pop())
    sender = BatchSender(None, None)  # type: ignore[arg-type]
    sender.send(lambda: {"x": torch.zeros(LARGE)})
    sender.send(lambda: {"x": torch.zeros(LARGE)})
    assert isinstance(sent[0], Offer)
    assert sent[1:] == [2, 2]
    other = BatchSender(None, None)  # type: ignore[arg-type]
    answers.append(Stop())  # type: ignore[arg-type]
    with pytest.raises(StopRequested):
        other.send(lambda: {"x": torch.zeros(LARGE)})


def test_workers_send_references_only_once_their_memory_is_known_to_be_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = np.array([0], np.int64)
    (probe,) = spans_of([own])
    pid = os.fork()
    if pid == 0:
        own[0] = os.getpid()
        signal.pause()
    try:
        assert wait_until(lambda: read(pid, [probe])[0].cast("q")[0] == pid)

        def status_after(pid: int) -> WorkerStatus:
            status = WorkerStatus(1)
            assert not status.readable
            SampleReceiver(status).probe(Chunk([], 0.0, pid, 0, 1, probe))
            return status

        assert status_after(pid).readable
        assert not status_after(os.getpid()).readable, "what lies there is not its process id"
        forbid(monkeypatch)
        assert not status_after(pid).readable
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
