"""Gloo greets on standard output when a group is built; what else is written there is kept."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import greeting
from odb_factory.runtime.greeting import without_greeting
from tests.dist import run_ranks
from tests.runtime.helpers import Lengths, PadCollate, open_files, run_epoch

GREETING = b"[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


def test_only_the_greeting_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    files = open_files()
    os.write(1, b"before\n")
    with without_greeting():
        os.write(1, b"[Gloo] is unwell\n" + GREETING + b"no end of line, " + GREETING)
        os.write(2, b"an error\n")
        os.write(1, b"the rest\n")
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out == "before\n[Gloo] is unwell\nno end of line, the rest\nafter\n"
    assert err == "an error\n"
    assert open_files() == files


def test_an_error_passes_and_what_was_written_before_it_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(1, b"a hint\n")
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"), without_greeting():
        fail()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "a hint\nafter\n"


def test_without_room_for_a_file_all_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(greeting.tempfile, "TemporaryFile", full)
    with without_greeting():
        os.write(1, GREETING)
    assert capfd.readouterr().out == GREETING.decode()


class Speaks(Lengths):
    """Says what it reads, on standard output."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        os.write(1, f"reading {index}\n".encode())
        return super().__getitem__(index)


def _said(rank: int, world: int) -> tuple[int, str]:
    """How many groups were built in this rank's processes, and what these wrote."""
    real = dist.ProcessGroupGloo
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as groups:

        def greets(*args: Any) -> Any:  # as torch does in some versions
            group = real(*args)
            os.write(1, GREETING)
            os.write(groups.fileno(), b".")
            return group

        dist.ProcessGroupGloo = greets  # type: ignore[misc, assignment]
        os.dup2(out.fileno(), 1)
        data = Speaks([10] * 6)
        with OdbDataLoader(data, PadCollate(), OdbConfig(token_budget=40, depth=4, timeout=30.0)) as loader:
            run_epoch(loader, data)
        os.write(1, b"done\n")
        out.seek(0)
        groups.seek(0)
        return len(groups.read()), out.read().decode()


@pytest.mark.distributed
def test_the_groups_of_the_collate_processes_do_not_greet() -> None:
    said = run_ranks(2, _said)
    for groups, text in said:
        assert groups == 2, "one to try, and the one of all ranks"
        assert "[Gloo]" not in text
        assert text.endswith("done\n")
    assert {line for _, text in said for line in text.splitlines()} == {"done", *(f"reading {i}" for i in range(6))}
