"""`resume_from_checkpoint` that names no checkpoint to go on from: what is wrong with it, and which ones there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_factory.trainer.resume import find_state

STATE = '{"loader": {}, "progress": {}, "audit": {}}'


def checkpoint(path: Path, *files: str) -> None:
    """A directory that holds these files."""
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text(STATE)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run that ended; its last checkpoint was not finished, and one was saved without odb."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10, 100):
        checkpoint(tmp_path / "out" / f"checkpoint-{step}", "odb_state.json", "trainer_state.json")
    checkpoint(tmp_path / "out" / "checkpoint-8", "trainer_state.json")
    checkpoint(tmp_path / "out" / "checkpoint-200", "odb_state.json")
    checkpoint(tmp_path / "ended", "trainer_state.json", "all_results.json", "odb_summary.json")
    checkpoint(tmp_path / "other" / "deeper", "notes.txt")
    checkpoint(tmp_path / "cut" / "checkpoint-3", "odb_state.json")
    checkpoint(tmp_path / "stock" / "checkpoint-3", "trainer_state.json")
    for name in ("trainer_state.json", "all_results.json"):  # as every run leaves them beside its checkpoints
        (tmp_path / "out" / name).write_text("{}")
    return tmp_path / "out"


ALL = "checkpoint-200, checkpoint-100, checkpoint-10, checkpoint-9, checkpoint-8"
LAST = "resume from out/checkpoint-100, the last complete one"

FAULTS = {
    "absent": (
        "out/checkpoint-11",
        f"there is no checkpoint out/checkpoint-11 (*, relative to *); out holds {ALL}: {LAST}",
    ),
    "absent, with a slash": (
        "out/chekpoint-9/",
        f"there is no checkpoint out/chekpoint-9/ (*); out holds {ALL}: {LAST}",
    ),
    "no such output_dir": (
        "uot/checkpoint-9",
        "there is no checkpoint uot/checkpoint-9 (*); there is no directory uot either: correct the path",
    ),
    "none beside it": (
        "other/checkpoint-9",
        "there is no checkpoint other/checkpoint-9 (*); there is no other one in other: correct the path, or remove *",
    ),
    "empty": ("", "there is no checkpoint '' (*); there is no other one in *: correct the path, or remove *"),
    "a file of a checkpoint": (
        "out/checkpoint-9/odb_state.json",
        f"out/checkpoint-9/odb_state.json (*) is a file, while a checkpoint is a directory; out holds {ALL}: {LAST}",
    ),
    "output_dir": ("out", f"out (*) is no checkpoint, but an output_dir that holds {ALL}: {LAST}"),
    "output_dir of stock": (
        "stock",
        "stock (*) is no checkpoint, but an output_dir that holds checkpoint-3: it is not complete, or was saved "
        "without odb, so start anew",
    ),
    "output_dir without checkpoints": (
        "ended",
        "ended (*) is the output_dir of a run that left no checkpoint in it; *",
    ),
    "any directory": (
        "other/deeper",
        "other/deeper (*) is no checkpoint, for it has no trainer_state.json; there is no other one in other: *",
    ),
    "without odb": (
        "out/checkpoint-8",
        "the checkpoint out/checkpoint-8 has no odb_state.json, so it does not say which samples are done: it was "
        "saved without odb: true. Resume it without odb, or start anew in another output_dir *",
    ),
    "incomplete": (
        "out/checkpoint-200",
        "the checkpoint out/checkpoint-200 is incomplete: it has no trainer_state.json, *; out holds checkpoint-100, "
        f"checkpoint-10, checkpoint-9, checkpoint-8: {LAST}",
    ),
    "incomplete, and no other": (
        "cut/checkpoint-3",
        "the checkpoint cut/checkpoint-3 is incomplete: *; there is no other one in cut: start anew in another *",
    ),
    "a number": (300, "resume_from_checkpoint must be true or the path of a checkpoint, got 300; correct it"),
}
"""What is given, and the sentence; `*`: any text."""


def matches(sentence: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(f"odb: {pattern}.").replace(r"\*", ".*"), sentence) is not None


@pytest.mark.parametrize(("given", "pattern"), FAULTS.values(), ids=FAULTS)
def test_the_fault_is_named_with_what_there_is(output: Path, given: Any, pattern: str) -> None:
    with pytest.raises(ValueError) as raised:
        find_state(given, output)
    assert matches(str(raised.value), pattern), raised.value


def test_an_absolute_path_is_not_said_to_be_relative(output: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint-11 \(resume_from_checkpoint\); \S+out holds checkpoint-200, "):
        find_state(str(output / "checkpoint-11"), output)


def test_many_are_counted(output: Path) -> None:
    for step in (300, 400):
        checkpoint(output / f"checkpoint-{step}", "odb_state.json", "trainer_state.json")
    names = "checkpoint-400, checkpoint-300, checkpoint-200, checkpoint-100, checkpoint-10 and 2 more"
    with pytest.raises(ValueError, match=f"out holds {names}: resume from out/checkpoint-400, the last complete one"):
        find_state("out/checkpoint-1", output)


@pytest.mark.parametrize("make", [str, Path])
def test_a_complete_one_is_found(output: Path, make: Callable[[str], Any]) -> None:
    assert find_state(make("out/checkpoint-9"), output) == (
        Path("out/checkpoint-9"),
        {"loader": {}, "progress": {}, "audit": {}},
    )


class TestTheLastOfTheOutputDir:
    """`resume_from_checkpoint: true`."""

    def test_it_is_that_of_the_most_updates(self, output: Path) -> None:
        (output / "checkpoint-200" / "trainer_state.json").write_text("{}")
        found = find_state(True, output)
        assert found is not None
        assert found[0].name == "checkpoint-200"

    def test_it_is_incomplete(self, output: Path) -> None:
        with pytest.raises(ValueError, match=r"checkpoint-200 is incomplete: .*checkpoint-100, the last complete one"):
            find_state(True, output)

    @pytest.mark.parametrize("name", ["ended", "nowhere"])
    def test_there_is_none(self, output: Path, name: str) -> None:
        with pytest.raises(ValueError, match=f"is true, and there is no checkpoint in output_dir {name}; correct out"):
            find_state(True, name)


@pytest.mark.parametrize("resume", [None, False])
def test_a_run_may_begin_anew(output: Path, resume: Any) -> None:
    assert find_state(resume, output) is None
