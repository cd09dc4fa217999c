"""A run that is killed at any moment continues, and what comes out is what an undisturbed run makes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main
from odb_factory.tools.data import output, run
from odb_factory.tools.data import source as source_module
from tests.tools.data.raw import (
    llava_row,
    sharegpt4o_row,
    ultrachat_row,
    write_llava,
    write_sharegpt4o,
    write_ultrachat,
)

ROWS = 23
CHUNK = 4

KILLED = """
import os, signal, sys
from odb_factory import cli
from odb_factory.tools.data import output, run

run.CHUNK = {chunk}
calls, write, moment, after = 0, output.write_json, int(sys.argv[1]), sys.argv[2] == "after"

def write_and_die(path, value):
    global calls
    calls += 1
    if calls == moment and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, value)
    if calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)

output.write_json = write_and_die
cli.main(["data", *sys.argv[3:]])
"""


def raw(kind: str, folder: Path) -> Path:
    """A raw dataset with a broken row and, if it has images, a missing one."""
    if kind == "ultrachat":
        rows = [ultrachat_row(n) for n in range(ROWS)]
        rows[6]["messages"][0]["role"] = "nobody"
        return write_ultrachat(folder, rows)
    if kind == "llava":
        rows = [llava_row(n) for n in range(ROWS)]
        del rows[6]["conversations"]
        return write_llava(folder, rows, {row["image"] for row in rows} - {"000000000005.jpg"})
    rows = [sharegpt4o_row(n) for n in range(ROWS)]
    lines = [json.dumps(row) for row in rows]
    lines[6] = "{"
    return write_sharegpt4o(folder, lines, {row["image"] for row in rows} - {"15.jpg"})


def content(folder: Path) -> dict[str, bytes]:
    """Every file but locks, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


# the state is written after each of 6 chunks, then the report, then dataset_info.json
@pytest.mark.parametrize("kind", ["ultrachat", "llava", "sharegpt4o"])
@pytest.mark.parametrize(("moment", "after"), [(1, False), (1, True), (4, False), (6, True), (7, False), (8, False)])
def test_killed(kind: str, moment: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, broken, whole = raw(kind, tmp_path / "raw"), tmp_path / "broken", tmp_path / "whole"
    arguments = [kind, "--source", str(source), "--dir"]
    command = [sys.executable, "-c", KILLED.format(chunk=CHUNK), str(moment), "after" if after else "before"]
    killed = subprocess.run([*command, *arguments, str(broken)], capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    finals = [name for name in content(broken) if name.endswith("k.jsonl")]
    assert bool(finals) == (moment >= 7)  # only when it is whole
    assert not (broken / "dataset_info.json").exists()

    monkeypatch.setattr(run, "CHUNK", CHUNK)
    skipped: list[int] = []
    rows = source_module.Source.rows
    monkeypatch.setattr(
        source_module.Source, "rows", lambda self, columns, skip: (skipped.append(skip), rows(self, columns, skip))[1]
    )
    assert main(["data", *arguments, str(broken)]) == 0
    done = min((moment - (not after)) * CHUNK, ROWS)
    assert skipped == ([] if moment == 8 and kind == "ultrachat" else [0 if moment >= 7 else done])
    assert main(["data", *arguments, str(whole)]) == 0
    assert content(broken) == content(whole)
    report = json.loads(next(whole.glob("*_report.json")).read_text())
    assert report["rows"] == ROWS
    assert sum(report["dropped"].values()) == {"ultrachat": 1, "llava": 4, "sharegpt4o": 2}[kind]


def test_an_error_midway_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = raw("ultrachat", tmp_path / "raw"), tmp_path / "data"
    monkeypatch.setattr(run, "CHUNK", CHUNK)
    third = sorted((source / "data").iterdir())[2]
    good = third.read_bytes()
    third.write_bytes(good[: len(good) // 2] + bytes(len(good) - len(good) // 2))
    stamp = third.stat()
    assert main(["data", "ultrachat", "--source", str(source), "--dir", str(folder)]) == 2
    assert not (folder / "ultrachat_200k.jsonl").exists()
    assert json.loads((folder / "ultrachat_200k_state.json").read_text())["rows"] == 16
    third.write_bytes(good)
    os.utime(third, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert main(["data", "ultrachat", "--source", str(source), "--dir", str(folder)]) == 0
    assert len((folder / "ultrachat_200k.jsonl").read_text().splitlines()) == ROWS - 1


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "llava", "--source", str(raw("llava", tmp_path / "raw")), "--dir", str(tmp_path / "data")]
    monkeypatch.setattr(run, "CHUNK", CHUNK)
    with monkeypatch.context() as patch:
        chunks = run._chunks

        def interrupted(rows: Any) -> Any:
            yield from itertools.islice(chunks(rows), 3)
            raise KeyboardInterrupt

        patch.setattr(run, "_chunks", interrupted)
        assert main(arguments) == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "continuing an interrupted run after row 12" in printed.err
    assert f"{ROWS} rows read, 19 written, 4 dropped" in printed.out


def test_another_source_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, folder = raw("ultrachat", tmp_path / "a"), raw("llava", tmp_path / "b"), tmp_path / "data"
    identity = {"version": 1, "limit": None, "origin": ["elsewhere"]}
    folder.mkdir()
    part = output.Output(folder, "ultrachat_200k", identity)
    part.commit(2, [{"conversations": []}] * 2, [])
    part.close()
    for kind, source in (("ultrachat", first), ("llava", other)):
        assert main(["data", kind, "--source", str(source), "--dir", str(folder)]) == 0
    assert len((folder / "ultrachat_200k.jsonl").read_text().splitlines()) == ROWS - 1
    assert set(json.loads((folder / "dataset_info.json").read_text())) == {"ultrachat_200k", "llava_150k"}


def test_rows_must_be_accounted_for(tmp_path: Path) -> None:
    part = output.Output(tmp_path, "x", {})
    with pytest.raises(ValueError, match="3 rows became 1 samples and 1 dropped rows"):
        part.commit(3, [{}], [{"reason": "r"}])
    part.close()
