"""The benchmark `first_step`: what is counted, and how it reads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.first_step.data import SIDES, draw_image
from benchmarks.first_step.decodes import LOG, counting
from benchmarks.first_step.run import folder_bytes
from benchmarks.first_step.view import plot, tables
from benchmarks.rows import Row, read_rows

OPENS = """
import multiprocessing
import sys

from PIL import Image


def decode(path):
    with Image.open(path) as image:
        image.load()
        return image.convert("L").resize((4, 4)).size


if __name__ == "__main__":
    jpeg, png = sys.argv[1:]
    Image.open(jpeg).size  # the header alone: nothing is decoded
    decode(png)
    decode(jpeg)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            pool.map(decode, [jpeg] * 5, chunksize=1)
"""


def test_decodings_are_counted_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = draw_image(random.Random(0), 200, 160)
    jpeg, png = tmp_path / "a.jpg", tmp_path / "a.png"
    image.save(jpeg)
    image.save(png)
    program = tmp_path / "opens.py"
    program.write_text(OPENS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with counting(tmp_path / "hook") as counts:
        subprocess.run([sys.executable, program, jpeg, png], check=True, timeout=60)
    assert (counts.opened, counts.decoded) == (12, 11)
    assert LOG not in os.environ
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_nothing_is_counted_afterwards(tmp_path: Path) -> None:
    with counting(tmp_path / "hook") as counts:
        pass
    jpeg = tmp_path / "a.jpg"
    draw_image(random.Random(0), 64, 64).save(jpeg)
    code = f"from PIL import Image; Image.open({str(jpeg)!r}).load()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (counts.opened, counts.decoded) == (0, 0)
    assert (tmp_path / "hook" / "events").read_bytes() == b""


def test_images_are_of_their_size_and_repeatable(tmp_path: Path) -> None:
    first, second = (draw_image(random.Random(7), 320, 240) for _ in range(2))
    assert first.size == (320, 240)
    assert first.tobytes() == second.tobytes()
    other = draw_image(random.Random(8), 320, 240)
    assert first.tobytes() != other.tobytes()
    first.save(tmp_path / "a.jpg", quality=88)
    assert (tmp_path / "a.jpg").stat().st_size > 320 * 240 / 20, "not a flat picture that decodes in no time"
    assert min(SIDES) // 3 > 8


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path / "missing") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"45")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "x")
    assert folder_bytes(tmp_path) == 5


def row(method: str, seconds: float, data: str = "ShareGPT", **figures: float) -> Row:
    common = {"first_step_s": seconds, "wall_s": seconds + 5, "cpu_s": 20.0, "peak_rss_gib": 1.5, "cache_mb": 8.0}
    what = "epoch" if figures else "first step"
    return Row(
        benchmark="first_step",
        what=what,
        data=data,
        method=method,
        settings={"samples": 1200},
        figures={**common, **figures},
    )


def test_tables_give_medians_and_ratios() -> None:
    rows = [row("standard", 80.0), row("standard", 90.0), row("standard", 130.0), row("odb", 18.0)]
    rows.append(row("odb", 30.0, "drawn JPEGs", decodes_per_sample=1.0, opens_per_sample=1.25))
    text = tables(rows)
    assert "| standard | 90.0 (80.0 to 130.0) | 1.00 |" in text
    assert "| odb | 18.0 | 0.20 |" in text
    assert "**ShareGPT**, 1,200 samples, up to the first step" in text
    assert "**drawn JPEGs**, 1,200 samples, one epoch" in text
    assert "| odb | 30.0 |  | 20 | 1.50 | 8.0 | 1.00 | 1.25 |" in text, "no ratio without Standard"
    assert len(plot(rows).axes) == 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    options = ["--quick", "--kinds", "images", "--json", str(file), "--work-dir", str(tmp_path / "work")]
    assert main(["first_step", *options]) == 0
    standard, odb = read_rows([file])
    assert (standard.method, odb.method) == ("standard", "odb")
    assert standard.figures["decodes_per_sample"] == 2
    assert 1 <= odb.figures["decodes_per_sample"] < 1.5  # type: ignore[operator]
    assert odb.figures["cache_mb"] < standard.figures["cache_mb"]  # type: ignore[operator]
    for one in (standard, odb):
        assert 0 < one.figures["first_step_s"] < one.figures["wall_s"]  # type: ignore[operator]
    assert "| odb |" in tables([standard, odb])
