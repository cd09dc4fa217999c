"""The benchmark `gpu`, with a tiny model on a CPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import view
from benchmarks.gpu.attention import TEXT, Kernel, disagreement, find_kernel, one_by_one, packed_row, register
from benchmarks.gpu.cell import in_order
from benchmarks.gpu.data import IGNORE, Content, Ids, Image, MadeSamples, Padded, Sample, lay_out, packed
from benchmarks.gpu.feeds import Feed, Maker, first_fit, workers_for
from benchmarks.gpu.measuring import figures_of, run
from benchmarks.gpu.shape import Work, make_model, peak_flops, work_of
from benchmarks.gpu.trainee import OutOfMemory, Trainee, memory_errors
from benchmarks.rows import Row, read_rows

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
LENGTHS = (40, 64, 17, 90, 9)
CONTENT = Content(visual=0.5, largest=12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(dtype: torch.dtype = torch.float32) -> Any:
    register(find_kernel(CPU)[0])
    return make_model(True, CPU, dtype, seed=0)


def _data(model: Any) -> MadeSamples:
    samples = [lay_out(length, CONTENT) for length in LENGTHS]
    return MadeSamples(samples, Ids.of(model.config), model.dtype, seed=0)


def _maker(data: MadeSamples, workers: int = 0) -> Maker:
    return Maker(data=data, padded=Padded(), longest=90, workers=workers, pin=False, depth=1024, seed=3)


@pytest.mark.parametrize("length", [1, 8, 16, 17, 100, 5000])
@pytest.mark.parametrize("visual", [0.0, 0.5, 0.95])
def test_images_fit_into_a_sample(length: int, visual: float) -> None:
    sample = lay_out(length, Content(visual=visual, largest=500))
    assert sample.length == length
    assert sample.visual_tokens + 2 * len(sample.images) <= max(0, length - 4)
    assert all(4 <= image.tokens <= 500 and image.height <= image.width for image in sample.images)
    if length >= 100 and visual:
        assert sample.visual_tokens >= 0.8 * visual * length
        assert len(sample.images) == -(-int(visual * length) // 500)


def test_samples_are_what_the_model_expects() -> None:
    model = _model()
    data = _data(model)
    for index, sample in enumerate(data.samples):
        made = data[index]
        ids = made["input_ids"]
        placeholders = ids == model.config.image_token_id
        assert len(ids) == sample.length
        assert int(placeholders.sum()) == sample.visual_tokens
        assert made["labels"][0] == IGNORE
        assert not (placeholders & (made["labels"] != IGNORE)).any()
        assert (made["labels"] != IGNORE).any()
        grid = made.get("image_grid_thw")
        if grid is not None:
            assert int(grid.prod(-1).sum()) == len(made["pixel_values"]) == 4 * sample.visual_tokens
        wanted, _ = model.model.get_rope_index(
            ids[None], mm_token_type_ids=placeholders.long()[None], image_grid_thw=grid
        )
        assert torch.equal(made["position_ids"], wanted[:, 0])
    assert torch.equal(data[1]["input_ids"], data[1]["input_ids"])
    assert not torch.equal(data[0]["input_ids"][-5:], data[1]["input_ids"][-5:])


def _loss_and_gradient(model: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    model.zero_grad()
    with packed_row(inputs.pop("sequences", None), batch.get("longest", 0)):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
    return float(loss.detach()), model.model.language_model.layers[0].self_attn.k_proj.weight.grad.clone()


def test_every_kind_of_batch_has_the_loss_and_gradient_of_its_samples_alone() -> None:
    model = _model()
    data = _data(model)
    samples = [data[index] for index in range(len(data))]
    targets = [int((sample["labels"][1:] != IGNORE).sum()) for sample in samples]
    alone = [_loss_and_gradient(model, Padded()([sample])) for sample in samples]
    loss = sum(count * value for count, (value, _) in zip(targets, alone, strict=True)) / sum(targets)
    gradient = sum(count * value for count, (_, value) in zip(targets, alone, strict=True)) / sum(targets)
    for batch in (Padded()(samples), Padded(mask=True)(samples), packed(samples)):
        got, got_gradient = _loss_and_gradient(model, batch)
        assert got == pytest.approx(loss, rel=1e-5)
        assert (got_gradient - gradient).norm() < 1e-4 * gradient.norm()
    mixed = packed(samples)
    mixed["sequences"] = mixed["sequences"][[0, -1]]
    mixed["longest"] = sum(LENGTHS)
    assert _loss_and_gradient(model, mixed)[0] != pytest.approx(loss, rel=1e-5), "samples that see each other differ"


def test_packed_rows_and_images_go_through_the_kernel_and_padded_rows_do_not() -> None:
    calls: list[tuple[int, bool]] = []

    def counting(query: Any, key: Any, value: Any, bounds: Any, longest: int, causal: bool) -> Any:
        calls.append((longest, causal))
        return one_by_one(query, key, value, bounds, longest, causal)

    model = _model()
    data = _data(model)
    register(Kernel("counting", counting, fast=False))
    samples = [data[index] for index in range(len(data))]
    layers = model.config.text_config.num_hidden_layers
    vision_layers = [(36, False)] * model.config.vision_config.depth  # the largest image: 9 visual tokens
    with torch.no_grad():
        _forward(model, Padded()(samples))
        assert calls == vision_layers
        calls.clear()
        _forward(model, packed(samples))
        assert calls == vision_layers + [(max(LENGTHS), True)] * layers
    assert model.config.text_config._attn_implementation == TEXT


def _forward(model: Any, batch: dict[str, Any]) -> None:
    inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    with packed_row(inputs.pop("sequences", None), batch.get("longest", 0)):
        model(**inputs, use_cache=False)


def test_a_kernel_that_mixes_sequences_is_found_out() -> None:
    def mixing(query: Any, key: Any, value: Any, bounds: Any, longest: int, causal: bool) -> Any:
        return one_by_one(query, key, value, bounds[[0, -1]], longest, causal)

    assert disagreement(one_by_one, CPU) < 1e-5
    assert disagreement(mixing, CPU) > 0.1


def test_a_model_in_bf16_is_updated_in_float32() -> None:
    """As on a GPU: a step of 1e-5 would be lost in most bf16 weights."""
    model = _model(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    trainee = Trainee(model, CPU)
    data = _data(model)
    batch = Padded()([data[index] for index in range(len(data))])
    assert batch["pixel_values"].dtype == torch.bfloat16
    frozen = model.model.visual.merger.linear_fc1.weight.clone()
    before = [master.clone() for master in trainee.optimizer.masters]
    losses = [float(trainee.step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(6.25, abs=0.2), "log(512): a random model knows nothing"
    moved = [(old - new).abs().max() for old, new in zip(before, trainee.optimizer.masters, strict=True)]
    # Adam moves a weight by about the learning rate at most, and those of a whole tensor are not all without gradient
    assert all(1e-6 < step < 4.1e-5 for step in moved)
    for parameter, master in zip(trainee.optimizer.parameters, trainee.optimizer.masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())
        assert parameter.grad is None
    assert torch.equal(frozen, model.model.visual.merger.linear_fc1.weight)


def test_work_by_hand() -> None:
    model = _model()
    work = work_of(model)
    # a layer: q and o 64 x 64, k and v 64 x 32, three of 64 x 128, norms of 64, 64, 16, 16; the head 512 x 64
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert work.per_token == 6 * (2 * layer + 512 * 64)
    assert work.per_square == 6 * 2 * 64
    text, image = work.of_sample(100, ()), work.of_sample(100, (Image(2, 3),))
    assert text == 100 * work.per_token + 100**2 * work.per_square
    assert image - text == pytest.approx(24 * work.per_patch + 24**2 * 4 * 2 * 32)


def test_the_full_shape_is_that_of_the_published_model() -> None:
    _model()
    full = make_model(False, torch.device("meta"), torch.bfloat16, seed=0)
    assert sum(parameter.numel() for parameter in full.parameters()) == 2_127_532_032
    assert work_of(full).per_token == pytest.approx(6 * 1.72e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_first_fit() -> None:
    assert first_fit([0, 1, 2, 3, 4], [60, 50, 40, 120, 50], 100) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("method", ["standard", "packing", "odb"])
@pytest.mark.distributed
def test_a_method_trains_on_every_sample_once(method: str) -> None:
    trainee = Trainee(_model(), CPU)
    data = _data(trainee.model)
    maker = _maker(data)
    feed = {"standard": maker.standard(2), "packing": maker.packing(128), "odb": maker.odb(128)}[method]
    outcome = run(trainee, feed, limit_s=60)
    assert outcome.complete
    assert sorted(outcome.indices) == list(range(len(LENGTHS)))
    figures = figures_of(outcome, data.samples, Work(2.0, 0.0, 0.0, 0.0), peak_flops=100.0)
    real = sum(LENGTHS)
    assert figures["tokens_per_s"] * figures["seconds"] == pytest.approx(real)
    assert figures["mfu"] * figures["seconds"] == pytest.approx(2 * real / 100)
    assert 0 <= figures["wait_share"] < 1
    assert outcome.loss == pytest.approx(6.25, abs=0.3)
    if method == "packing":
        assert figures["padding_share"] == 0
    if method == "standard":
        pairs = [outcome.indices[at : at + 2] for at in range(0, len(LENGTHS), 2)]
        assert outcome.padded_tokens == sum(max(LENGTHS[i] for i in pair) * len(pair) for pair in pairs)
        assert max(len(batch["indices"]) for batch in feed.warm_up) == 2


def test_a_run_whose_time_is_up_ends_and_says_so() -> None:
    trainee = Trainee(_model(), CPU)
    outcome = run(trainee, _maker(_data(trainee.model)).standard(1), limit_s=0.0)
    assert not outcome.complete
    assert outcome.steps == len(outcome.indices) == 1


def test_the_costliest_micro_batches_warm_up() -> None:
    model = _model()
    maker = _maker(_data(model))
    costliest, widest = maker.odb(128).warm_up
    assert costliest["input_ids"].shape == (1, 90) or costliest["input_ids"].numel() > 90
    assert len(widest["indices"]) >= len(costliest["indices"])
    assert 3 in maker.standard(2).warm_up[0]["indices"]


def test_no_more_workers_than_shared_memory_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    free = shutil.disk_usage("/dev/shm").free
    batch = {"x": torch.empty(free // 5, dtype=torch.uint8, device="meta"), "longest": 3}
    assert workers_for(batch, 8) in (1, 2)
    assert "too small" in capsys.readouterr().out
    assert workers_for({"x": torch.empty(1)}, 8) == 8


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"):
        with pytest.raises(OutOfMemory, match="CUDA"), memory_errors():
            raise RuntimeError(text)
    with pytest.raises(OutOfMemory, match="Tried"), memory_errors():
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        raise RuntimeError("shape mismatch")


def _row(method: str, rate: float | None, budget: int, **settings: Any) -> Row:
    figures: dict[str, Any] = {"out_of_memory": True}
    if rate is not None:
        names = ("tokens_per_s", "padded_tokens_per_s", "first_batch_s", "steps", "seconds")
        figures = {"samples_per_s": rate, "padding_share": 0.25, "wait_share": 0.01, **dict.fromkeys(names, 1234.0)}
    fixed = {"samples": 500, "tiny": False, "masked": False, "trial": False, "complete": rate is not None}
    fixed |= {"kernel": "flash-attn", "dtype": "bfloat16"}
    return Row(
        benchmark="gpu",
        what="text",
        data="ultrachat",
        method=method,
        budget=budget,
        settings=fixed | settings,
        figures=figures | {"peak_allocated_gib": 100.0, "peak_reserved_gib": 120.0},
    )


def test_the_table_compares_with_standard_at_its_best() -> None:
    rows = [
        _row("standard", 9.0, 4096, batch_size=1, trial=True),
        _row("standard", None, 8192, batch_size=2, trial=True),
        _row("odb", 25.0, 16384),
        _row("standard", 10.0, 4096, batch_size=1),
        _row("odb", None, 32768),
        _row("packing", 5.0, 8192, complete=False),
    ]
    text = view.tables(rows)
    assert "| ODB, budget 16,384 | 25 | 2.50 |" in text
    assert "| ODB, budget 32,768 | out of memory |" in text
    assert "| packing, padding-free, budget 8,192 \\* | 5 | 0.50 |" in text
    assert "1: 9, 2: out of memory" in text
    assert "stopped before" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert view.tables([rows[2]]).count("| 25 |  |") == 1, "without Standard there is nothing to compare with"
    assert [len(axes.get_lines()) for axes in view.plot(rows).axes] == [3]
    assert view.plot([]).axes == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_quick_run_needs_torch_and_transformers_only(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    arguments = ["gpu", "--quick", "--json", str(file), "--device", "cpu", "--cells", "llava:image"]
    arguments += ["--budgets", "16384", "--seconds-per-config", "0.5", "--minutes", "5"]
    program = (
        "import sys; from benchmarks.__main__ import main; code = main(sys.argv[1:])\n"
        "rest = {'llamafactory', 'datasets', 'matplotlib', 'deepspeed', 'peft'} & set(sys.modules)\n"
        "print('NOT NEEDED:', sorted(rest))\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NOT NEEDED: []" in done.stdout
    assert "WRONG" not in done.stdout
    rows = read_rows([file])
    measured = [row for row in rows if not row.settings["trial"]]
    assert {"standard", "odb", "packing"} <= {row.method for row in measured}
    assert len({row.settings["samples"] for row in rows}) == 1, "the same samples for every method"
    for row in measured:
        assert row.settings["complete"]
        assert row.figures["samples"] == row.figures["unique_samples"] == row.settings["samples"]
    padding = {row.method: row.figures["padding_share"] for row in measured}
    assert padding["packing"] == 0 < padding["odb"]
    trials = [row.settings["batch_size"] for row in rows if row.settings["trial"]]
    assert all(second == 2 * first for first, second in pairwise(trials))
    assert "| ODB, budget 1,024 |" in done.stdout
    assert json.loads(file.read_text().splitlines()[0])["what"] == "image"


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main

    for arguments, text in (
        (["--cells", "lava:text"], "'lava:text' is no cell"),
        (["--methods", "odb,sorted"], "no such method: sorted"),
        (["--budgets", "many"], "give whole numbers"),
        (["--cells", "ultrachat:image"], "have no images"),
    ):
        assert main(["gpu", "--json", str(tmp_path / "x.jsonl"), "--device", "cpu", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_what_matters_most_is_measured_first() -> None:
    order = in_order((1, 2, 3), 2)
    assert order[:4] == [("odb", 2), ("packing", 2), ("odb", 1), ("odb", 3)]
    assert len(set(order)) == len(order) == 9


def test_feeds_say_what_they_are() -> None:
    maker = _maker(_data(_model()))
    feeds: list[Feed] = [maker.standard(2), maker.packing(128), maker.odb(128)]
    assert [(feed.method, feed.budget, feed.depth) for feed in feeds] == [
        ("standard", 180, None),
        ("packing", 128, None),
        ("odb", 128, 1024),
    ]
    assert Sample(4).visual_tokens == 0
