"""The benchmark `loader`: samples, figures, the watcher, the view, and a quick run."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.loader import view
from benchmarks.loader.kinds import IGNORED, KINDS, PATCH, Material, collate, dataset_of, prepare, read_patches
from benchmarks.loader.methods import METHODS, available
from benchmarks.loader.rank import Seen
from benchmarks.loader.run import SETUPS, coverage, speed_figures, wait_figures
from benchmarks.loader.watch import watched
from benchmarks.rows import Row, read_rows


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "text_real"])
def test_samples_carry_their_number_and_what_a_model_takes(kind: str, tmp_path: Path) -> None:
    data = dataset_of(prepare(kind, 5, 0, tmp_path))
    samples = [data[index] for index in (3, 1)]
    batch = collate(samples)
    assert batch["index"].tolist() == [3, 1]
    assert batch["attention_mask"].sum(1).tolist() == [len(sample["input_ids"]) for sample in samples]
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    if KINDS[kind].pixels:
        assert batch["pixel_values"].shape == (int(batch["image_grid_thw"].prod(1).sum()), 1536)
        assert batch["pixel_values"].dtype == KINDS[kind].dtype
    else:
        assert "pixel_values" not in batch


def test_made_pixels_are_some_four_megabytes_a_sample(tmp_path: Path) -> None:
    data = dataset_of(prepare("pixels", 60, 0, tmp_path))
    sizes = [data[index]["pixel_values"].nbytes for index in range(60)]
    assert 3.4e6 < sum(sizes) / 60 < 4.8e6
    halves = dataset_of(prepare("pixels_bf16", 60, 0, tmp_path))
    assert [2 * halves[index]["pixel_values"].nbytes for index in range(60)] == sizes


def test_real_text_is_templated_and_only_answers_are_learned(tmp_path: Path) -> None:
    """Needs no tokenizer package here: bytes as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    turns = '[[{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]]'
    (tmp_path / "conversations.json").write_text(turns)
    sample = dataset_of(Material("text_real", (0,), str(tmp_path)))[0]
    asked, answered = "<|im_start|>user\nWhy?<|im_end|>\n", "<|im_start|>assistant\nSo.<|im_end|>\n"
    assert len(sample["input_ids"]) == len(asked + answered)
    learned = sample["labels"] != IGNORED
    assert int(learned.sum()) == len("So.<|im_end|>\n")
    assert learned[-len("So.<|im_end|>\n") :].all()


def test_patches_of_a_visual_token_stand_together(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    patches, grid = read_patches(tmp_path / "x.png")
    assert grid == (1, 4, 6)
    # the second visual token of the first row: rows 0 and 1, columns 2 and 3 of patches
    for at, (row, column) in enumerate([(0, 2), (0, 3), (1, 2), (1, 3)], start=4):
        block = pixels[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        wanted = block.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1
        found = patches[at].reshape(3, 2, PATCH, PATCH)
        assert np.array_equal(found[:, 0], wanted)
        assert np.array_equal(found[:, 1], wanted)


def test_every_sample_once() -> None:
    assert coverage([2, 0, 1], 3) == {"repeated": 0, "missing": 0}
    assert coverage([2, 0, 2, 2], 4) == {"repeated": 2, "missing": 2}


def seen(began: float, first: float, ended: float, samples: int, **values: float) -> Seen:
    return Seen(began=began, first=first, ended=ended, indices=list(range(samples)), **values)  # type: ignore[arg-type]


def test_rates_count_from_the_first_batch_on() -> None:
    ranks = [
        seen(0, 1, 9, 40, first_samples=4, cpu=1.0, batches=9, tokens=30, padded_tokens=40, nbytes=6_000_000),
        seen(0, 2, 11, 20, first_samples=6, cpu=2.0, batches=8, fillers=1, tokens=30, padded_tokens=40),
    ]
    figures = speed_figures(ranks)
    assert figures["samples_per_s"] == pytest.approx((60 - 10) / (11 - 1))
    assert figures["epoch_samples_per_s"] == pytest.approx(60 / 11)
    assert figures["mb_per_s"] == pytest.approx(6 * 50 / 60 / 10)
    assert figures["cpu_ms_per_sample"] == pytest.approx(50)
    assert figures["first_batch_s"] == 2
    assert figures["padding"] == pytest.approx(0.25)
    assert (figures["batches"], figures["fillers"]) == (17, 1)
    nothing = speed_figures([*ranks, Seen(began=0.0)])
    assert nothing["samples_per_s"] == figures["samples_per_s"], "a rank that got no batch"


def test_the_wait_for_the_first_batch_stands_apart() -> None:
    figures = wait_figures([seen(10, 12, 22, 8, waited=4, padded_tokens=80)], seconds_per_token=0.1)
    assert figures["wait_share"] == pytest.approx((4 - 2) / 10)
    assert figures["wait_share_with_start"] == pytest.approx(4 / 12)
    assert figures["trainer_s"] == pytest.approx(8)


def test_the_watcher_sees_private_and_shared_memory_of_all_processes(tmp_path: Path) -> None:
    """A process of a session of its own takes 60 MB, and maps 40 MB in /dev/shm that have no name."""
    child = _hold(tmp_path)
    with watched(tmp_path, 1) as peak:
        os.waitpid(child, 0)
    assert 60 <= peak.private / 1e6 < 75
    assert 40 <= peak.mapped / 1e6 < 45
    assert peak.shared >= 39e6
    assert peak.shm_files >= 39e6
    assert peak.processes == 1


def _hold(folder: Path) -> int:
    """Forks that process; it says that it is ready, and begins when the watcher says so."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "rank-0")
    while not (folder / "go").exists():
        time.sleep(0.01)
    held = b"x" * 60_000_000
    with open("/dev/shm/odb-test-watch", "w+b") as file:
        os.unlink(file.name)
        file.write(b"x" * 40_000_000)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as shared:
            sum(shared[::4096])
            time.sleep(1.0)
    os._exit(len(held) == 0)


def row(method: str, repetition: int, rate: float) -> Row:
    names = ("epoch_samples_per_s", "mb_per_s", "cpu_ms_per_sample", "first_batch_s", "repeated", "missing")
    figures = {"samples_per_s": rate, **dict.fromkeys(names, 1.0)}
    settings = {"workers": 2, "repetition": repetition}
    return Row(
        benchmark="loader",
        what="speed",
        data="text",
        method=method,
        ranks=1,
        settings=settings,  # type: ignore[arg-type]
        figures=figures,  # type: ignore[arg-type]
    )


def test_ratios_are_within_a_repetition() -> None:
    """The machine is half as fast in the second one: the ratio is the same."""
    rows = [row("plain", 0, 100.0), row("odb", 0, 90.0), row("plain", 1, 50.0), row("odb", 1, 45.0)]
    line = view.tables(rows).splitlines()[-1]
    assert line.startswith("| text | 1 x 2 | odb-factory | 68 (45 to 90) | 0.90 (0.90 to 0.90) |")
    assert [bar.get_height() for bar in view.plot(rows).axes[0].patches] == pytest.approx([0.9, 0.0])
    alone = view.tables([row("odb", 0, 90.0)])
    assert "| text | 1 x 2 | odb-factory | 90 |  |" in alone, "without the plain loader"


def test_kinds_fit_their_setups() -> None:
    assert list(SETUPS) == list(KINDS)
    assert all(setup.size % 2 == 0 for setup in SETUPS.values()), "or the plain loader repeats one on two ranks"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_quick(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "loader", "--quick", "--json", str(file)], check=True, timeout=390
    )
    rows = read_rows([file])
    installed = {method for method in METHODS if available(method)}
    assert {(r.what, r.data, r.ranks) for r in rows} == {
        ("speed", "text", 1),
        ("speed", "text", 2),
        ("wait", "text", 1),
        ("speed", "pixels", 1),
        ("memory", "pixels", 1),
    }
    assert {r.method for r in rows} == installed
    for found in _of(rows, "speed", "odb"):
        assert (found.figures["repeated"], found.figures["missing"]) == (0, 0)
        assert found.figures["samples_per_s"] > 0  # type: ignore[operator]
    (plain,) = _of(rows, "memory", "plain")
    assert plain.figures["shared_mb"] > 1, "a plain loader sends its batches through shared memory"  # type: ignore[operator]
    text = view.tables(rows)
    assert all(view.METHODS[method] in text for method in installed)
    view.plot(rows)


def _of(rows: Sequence[Row], what: str, method: str) -> list[Row]:
    return [row for row in rows if (row.what, row.method) == (what, method)]


def test_a_batch_of_the_collate_function_is_padded_with_ignored_labels() -> None:
    one = {"index": 0, "input_ids": torch.tensor([5]), "attention_mask": torch.tensor([1]), "labels": torch.tensor([5])}
    two = {name: value.repeat(3) if isinstance(value, torch.Tensor) else 1 for name, value in one.items()}
    batch = collate([one, two])
    assert batch["labels"].tolist() == [[5, IGNORED, IGNORED], [5, 5, 5]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
