"""Reading another process's memory, and what happens where that is forbidden or the process is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import courier, remote, session
from odb_factory.runtime.blocks import HUGE_PAGE, Pool, allocate
from odb_factory.runtime.courier import Sender
from odb_factory.runtime.messages import Fetched, Lent, Stop
from odb_factory.runtime.packing import LARGE, pack
from odb_factory.runtime.remote import Forbidden, Gone, fetch, spans_of
from odb_factory.runtime.shipping import Board, Pending, Shipment
from tests.runtime.helpers import Lengths, PadCollate, all_of, open_files, run_epoch, wait_until


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
        remote.ctypes.set_errno(remote.errno.EPERM)
        return -1

    monkeypatch.setattr(remote, "_readv", refuse)


def test_what_lies_in_another_process_arrives_and_is_not_what_lies_here() -> None:
    parts = [np.arange(size, dtype=np.uint8) for size in (1, 4096, 3 * HUGE_PAGE + 5)] * 700  # more than one call takes
    pid = os.fork()
    if pid == 0:
        signal.pause()
    spans = spans_of(parts[:3]) * 700
    for part in parts[:3]:
        part[:] = 0  # here, and not there
    try:
        got = fetch(pid, spans[:2000:3] + spans[1:2000:3] + spans[2:3])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [len(block) for block in got] == [1] * 667 + [4096] * 667 + [3 * HUGE_PAGE + 5]
    assert all(bytes(block) == bytes(range(256)) * 16 for block in got[667:-1])
    assert np.array_equal(np.frombuffer(got[-1], np.uint8), np.arange(3 * HUGE_PAGE + 5, dtype=np.uint8))


def test_a_process_that_has_ended_is_gone_and_no_other_memory_is_read(child: int) -> None:
    spans = spans_of([np.ones(100, np.uint8)])
    assert bytes(fetch(child, [(spans[0][0], 4)])[0]) != b""
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    with pytest.raises(Gone):
        fetch(child, spans)


def test_memory_that_is_not_there_is_an_error(child: int) -> None:
    with pytest.raises(OSError, match="Bad address"):
        fetch(child, [(8, 100)])


def test_a_refusal_is_no_other_error(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    with pytest.raises(Forbidden):
        fetch(child, spans_of([np.ones(100, np.uint8)]))
    monkeypatch.setattr(remote, "_readv", None)
    with pytest.raises(Forbidden):
        fetch(child, spans_of([np.ones(100, np.uint8)]))


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
    kept, fetched = [], []

    def note(*args: Any) -> Any:
        result = courier.accept(*args)
        fetched.append(result[0].done)
        return result

    monkeypatch.setattr(session, "accept", note)
    with OdbDataLoader(data, StackPixels(), OdbConfig(token_budget=100, depth=40), num_workers=workers) as loader:
        for batch, info in loader:
            assert batch["pixels"][:, 0].tolist() == list(info.indices)
            assert (batch["pixels"] == batch["pixels"][:, :1]).all()
            batch["pixels"] += 1000.0  # the consumer's own, for as long as it likes
            kept.append((batch["pixels"], info.indices))
            assert "/dev/shm/torch_" not in Path("/proc/self/maps").read_text()
    assert fetched == ([True] * len(kept) if allowed else [False]), "and it was the way that it should be"
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


def test_a_lender_that_is_refused_sends_it_all_and_lends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    answers = [Fetched(False)]
    monkeypatch.setattr(courier, "send", lambda sock, message: sent.append(message))
    monkeypatch.setattr(courier, "send_parts", lambda sock, parts: sent.append(len(parts)))
    monkeypatch.setattr(courier, "receive", lambda sock: answers.pop())
    sender = Sender(None)  # type: ignore[arg-type]
    sender.send({"x": torch.zeros(LARGE)})
    sender.send({"x": torch.zeros(LARGE)})
    assert isinstance(sent[0], Lent)
    assert sent[1:] == [2, 2]
    other = Sender(None)  # type: ignore[arg-type]
    answers.append(Stop())  # type: ignore[arg-type]
    with pytest.raises(courier.Leave):
        other.send({"x": torch.zeros(LARGE)})


# --- small shipments


def shipment(seconds: float, nbytes: int, count: int = 1) -> Shipment:
    from odb_factory.core.sample import SampleMeta
    from odb_factory.runtime.shipping import OnLoan

    meta = SampleMeta(index=0, length=1, loss_tokens=0, nbytes=nbytes)
    return Shipment([OnLoan(meta, [])] * count, seconds, 1, 0, 1, (0, 8))


@pytest.mark.parametrize(
    ("seconds", "nbytes", "size"),
    [(1e-5, 100, 16), (1e-3, 100, 5), (1.0, 100, 1), (1e-5, 64 * 2**10, 4), (1e-5, 30 * 2**20, 1)],
)
def test_small_and_quick_samples_are_read_several_at_a_time(seconds: float, nbytes: int, size: int) -> None:
    pending = Pending(most=16)
    pending.indices.extend(range(40))
    chunks = iter(pending)
    assert next(chunks) == ((0, 0),), "one, until something is known of them"
    pending.learn(shipment(seconds, nbytes))
    assert len(next(chunks)) == size
    assert [index for chunk in chunks for _, index in chunk] == list(range(1 + size, 40))


def test_one_large_sample_among_small_ones_is_remembered() -> None:
    pending = Pending(most=16)
    pending.indices.extend(range(100))
    chunks = iter(pending)
    pending.learn(shipment(1e-5, 20 * 2**20))
    pending.learn(shipment(1e-5, 100))
    assert len(next(chunks)) == 1
    for _ in range(300):
        pending.learn(shipment(1e-5, 100))
    assert len(next(chunks)) == 16


def test_workers_lend_only_once_it_is_known_that_their_memory_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own = np.array([0], np.int64)
    (probe,) = spans_of([own])
    pid = os.fork()
    if pid == 0:
        own[0] = os.getpid()
        signal.pause()
    try:
        assert wait_until(lambda: fetch(pid, [probe])[0].cast("q")[0] == pid)

        def board_after(pid: int) -> Board:
            board = Board(1)
            assert not board.lends
            board.find_out(Shipment([], 0.0, pid, 0, 1, probe))
            return board

        assert board_after(pid).lends
        assert not board_after(os.getpid()).lends, "what lies there is not its process id"
        forbid(monkeypatch)
        assert not board_after(pid).lends
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- memory


@pytest.mark.parametrize("nbytes", [0, 1, 2**20 - 1, 2**20, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 17])
def test_memory_has_the_size_asked_for_and_can_be_written_to(nbytes: int) -> None:
    block = allocate(nbytes)
    assert block.nbytes == nbytes
    block[:] = 7
    assert int(block.sum(dtype=np.int64)) == 7 * nbytes


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_no_more_memory_is_held_than_asked_for_and_none_after_it() -> None:
    before = resident()
    blocks = [allocate(HUGE_PAGE + 2**20 + 1) for _ in range(20)]
    for block in blocks:
        block[:] = 1
    assert 0.9 < (resident() - before) / (20 * (HUGE_PAGE + 2**20)) < 1.1
    del blocks, block
    assert resident() - before < 2 * HUGE_PAGE


def address(buffer: Any) -> int:
    return spans_of([buffer])[0][0]


@pytest.mark.parametrize("view", [lambda m: torch.frombuffer(m, dtype=torch.uint8)[5:], lambda m: np.frombuffer(m)[1:]])
def test_memory_is_used_again_only_when_nobody_has_it(view: Callable[[memoryview], Any]) -> None:
    pool = Pool(most=2)
    first = pool.allocate(4 * 2**20).data
    held, where = view(first), address(first)
    del first
    other = pool.allocate(4 * 2**20)
    assert address(other) != where, "a part of it is still held"
    del held
    again = pool.allocate(4 * 2**20 - 5)
    assert address(again) == where
    assert again.nbytes == 4 * 2**20 - 5
    del again
    assert address(pool.allocate(2**20)) != where, "far too large for that"


def test_a_pool_keeps_few_blocks() -> None:
    pool = Pool(most=2)
    blocks = [pool.allocate(2**20) for _ in range(5)]
    del blocks
    assert len(pool._unused) == 2


def test_a_packed_sample_has_large_tensors_beside_it_in_their_own_memory() -> None:
    sample = {"small": torch.arange(5), "large": torch.arange(LARGE), "strided": torch.zeros(LARGE, 2)[:, 0]}
    packed = pack(sample)
    assert len(packed.buffers) == 2
    assert packed.nbytes == len(packed.head) + LARGE * 8 + LARGE * 4
    own = packed.copy().unpack()
    packed.unpack()["large"][0] = 77
    assert int(sample["large"][0]) == 77, "the same memory"
    assert int(own["large"][0]) == 0
    assert int(own["small"][4]) == 4


def test_an_epoch_with_small_samples_is_complete_with_many_workers() -> None:
    data = Lengths([3 + i % 20 for i in range(2000)], drop={7, 500})
    with OdbDataLoader(data, PadCollate(), OdbConfig(token_budget=100, depth=256), num_workers=2) as loader:
        epochs = [run_epoch(loader, data) for _ in range(2)]
    for epoch in epochs:
        assert all_of([epoch]) == sorted(set(range(2000)) - {7, 500})
