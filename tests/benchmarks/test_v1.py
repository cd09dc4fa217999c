"""The benchmark `v1`: v1's own strategies as v1 runs them, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.rows import read_rows
from benchmarks.v1.strategies import dynamic_batching, normal


def test_normal_leaves_out_what_fills_no_step() -> None:
    epoch = normal([10] * 23, world=2, batch_size=4, seed=0)
    assert len(epoch.steps) == 2
    assert sorted(epoch.emitted.values()) == [1] * 16


def test_dynamic_batching_keeps_to_the_budget_and_repeats() -> None:
    lengths = [7, 30, 12, 5, 22, 9, 16, 3, 40, 11, 8, 27] * 5
    epoch = dynamic_batching(lengths, world=2, batch_size=2, cutoff=40, seed=0)
    micros = [micro for step in epoch.steps for micro in step]
    assert all(micro.padded_tokens <= 80 or len(micro.samples) == 1 for micro in micros)
    assert set(epoch.emitted) == set(range(60)), "both ranks got through their samples"
    assert epoch.emitted.total() > 60, "one of them began again meanwhile"


def test_dynamic_batching_is_what_v1_would_train_on() -> None:
    """The same micro-batches as v1's own method makes of the same samples, tensors and all."""
    from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin
    from llamafactory.v1.utils.objects import StatefulBuffer
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    lengths = [7, 30, 12, 5, 22, 9, 16, 3, 40, 11]
    order = list(StatefulDistributedSampler(lengths, 1, 0, shuffle=True, seed=0, drop_last=True))
    info, buffer = {"micro_batch_size": 2, "num_micro_batch": 1, "cutoff_len": 40}, StatefulBuffer()
    samples = iter([*order, *order])
    epoch = dynamic_batching(lengths, world=1, batch_size=2, cutoff=40, seed=0)
    strategy = BatchingPlugin("dynamic_batching")
    for (micro,) in epoch.steps:
        strategy.fill_buffer(buffer, info, lambda restart: [{"input_ids": [1] * lengths[next(samples)]}])
        (batch,) = strategy.generate_batch(buffer, info)
        assert tuple(batch["input_ids"].shape) == (len(micro.samples), max(lengths[i] for i in micro.samples))


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["v1", "--json", str(out), "--quick"]) == 0
    rows = read_rows([out])
    assert {(row.method, row.ranks) for row in rows} == {
        (method, ranks) for method in ("v1 normal", "v1 dynamic_batching", "odb") for ranks in (2, 8)
    }
    ours = [row for row in rows if row.method == "odb"]
    assert all(row.figures["repeated"] == row.figures["missing"] == 0 for row in ours)
    assert "| dynamic_batching |" in capsys.readouterr().out
