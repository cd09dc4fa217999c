"""The frame of the benchmarks: rows, profiles of lengths, the model of step time, the report."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, READERS, command_of, main
from benchmarks.epochs import Epoch, Micro, StepTime, ideal_share
from benchmarks.errors import BenchmarkError
from benchmarks.lengths import PROFILES, draw, read_lengths
from benchmarks.report import load, origin
from benchmarks.rows import Row, RowWriter, median_and_spread, read_rows


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_have_their_mean_and_variation(name: str) -> None:
    lengths = draw(name, 40_000, seed=3)
    mean = statistics.fmean(lengths)
    assert mean == pytest.approx(PROFILES[name].mean, rel=0.02)
    assert statistics.pstdev(lengths) / mean == pytest.approx(PROFILES[name].cv, rel=0.02)
    assert max(lengths) <= PROFILES[name].longest


def test_profiles_depend_on_the_seed_alone() -> None:
    assert draw("llava", 50, seed=1) == draw("llava", 50, seed=1)
    assert draw("llava", 50, seed=1) != draw("llava", 50, seed=2)
    assert draw("llava", 50, seed=1) != draw("ultrachat", 50, seed=1)


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(BenchmarkError, match=r"'lava'.*ultrachat"):
        draw("lava", 1)


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n7\n")
    assert read_lengths(file) == [12, 7]
    for text, place in (("12\n\n7", "line 2"), ("0\n", "line 1"), ("3.5", "line 1"), ("", "no lengths")):
        file.write_text(text)
        with pytest.raises(BenchmarkError, match=place):
            read_lengths(file)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "rows" / "x.jsonl"
    writer = RowWriter("balance", "python -m benchmarks balance", file)
    written = writer.add(
        what="epoch", data="llava", method="odb", ranks=2, figures={"share": 0.98765432109, "steps": 3}
    )
    assert read_rows([file]) == [written], "before it is closed: what was measured is kept when the run is cut short"
    writer.close()
    assert written.figures == {"share": 0.987654, "steps": 3}
    assert written.versions["torch"]
    assert written.hardware["cores"]
    assert written.date.endswith("+00:00")
    file.write_text(file.read_text() + '{"benchmark": "balance", "unknown": 1}\n')
    with pytest.raises(BenchmarkError, match=r"x\.jsonl, line 2"):
        read_rows([file])


def test_the_command_of_a_row_names_no_place() -> None:
    argv = ["train", "--work-dir", "/some/where", "--json=/other/x.jsonl", "--repetitions", "3"]
    options = argparse.Namespace(work_dir=Path("/some/where"), json=Path("/other/x.jsonl"), repetitions=3)
    assert command_of(argv, options) == "python -m benchmarks train --repetitions 3"


def test_the_slowest_rank_sets_the_time() -> None:
    a, b = Micro((0, 1), 20, 200), Micro((2,), 8, 64)
    epoch = Epoch(((a, b), (Micro((), 4, 16), Micro((3,), 8, 64))), (10, 6, 8, 8))
    assert StepTime().of_epoch(epoch) == 28
    assert ideal_share(epoch) == pytest.approx(32 / (2 * 28))
    assert epoch.fillers == 1
    assert epoch.padded_tokens == 40
    # attention: (100 + 36 + 64 + 64) squares are needed, 200 + 64 are paid on each rank
    assert ideal_share(epoch, StepTime(0, 0, 1)) == pytest.approx(264 / (2 * 264))
    assert StepTime(constant=5).of_epoch(epoch) == 38


def test_a_sample_that_is_repeated_is_useful_once() -> None:
    micro = Micro((0, 0), 20, 200)
    assert ideal_share(Epoch(((micro,),), (10,))) == pytest.approx(0.5)


def test_median_and_spread() -> None:
    assert median_and_spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_the_report_says_where_rows_come_from(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no rows"):
        load(tmp_path)
    row = Row(
        benchmark="balance",
        what="epoch",
        data="llava",
        method="odb",
        command="python -m benchmarks balance",
        versions={"torch": "2.9"},
        hardware={"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "gpu": "A GPU", "gpus": 1},
        date="2026-01-02T03:04:05+00:00",
    )
    (tmp_path / "balance.jsonl").write_text(json.dumps({name: getattr(row, name) for name in row.__slots__}) + "\n")
    (rows,) = load(tmp_path).values()
    assert rows == [row]
    text = origin(rows)
    for part in ("`python -m benchmarks balance`", "1 x A GPU", "torch 2.9", "2026-01-02"):
        assert part in text


@pytest.mark.parametrize("name", [*BENCHMARKS, *READERS])
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert "--json" in capsys.readouterr().out or name in READERS
