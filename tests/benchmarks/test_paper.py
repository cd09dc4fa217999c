"""The paper's tables: what may be fitted, the fits, the predictions, the tables, and a cell measured for real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.batchers import METHODS, Settings
from benchmarks.epochs import StepTime
from benchmarks.errors import BenchmarkError
from benchmarks.lengths import PROFILES, draw
from benchmarks.paper import view
from benchmarks.paper.cell_run import prepare, read_run
from benchmarks.paper.cells import RATE, SPEEDUP, Cell, Setting, cells, reference
from benchmarks.paper.fit import ForbiddenFit, fit_all, fit_constant, only_standard
from benchmarks.paper.model import OURS, Assumptions, Model, Works
from benchmarks.paper.work import Work
from benchmarks.rows import Row, RowWriter, read_rows

SMALL = Assumptions(most_samples=1500, depth=64)


def work_of(method: str, data: str = "llava", *, world: int = 4, batch_size: int = 1, size: int = 800) -> Work:
    settings = Settings(world=world, budget=8192, depth=64, batch_size=batch_size, cutoff=4096)
    return Work.of(METHODS[method](draw(data, size), settings))


def cell(method: str = "standard", quantity: str = RATE, value: float | None = 3.0, **changes: Any) -> Cell:
    setting = Setting(dataset="llava", model="8B", nodes=1)
    return Cell(
        table="single node", settings=(setting,), method=method, quantity=quantity, low=value, high=value, **changes
    )


# ---- the guard


def test_only_published_rates_of_standard_may_be_fitted() -> None:
    allowed = [c for c in cells() if c.may_be_fitted]
    assert sorted(c.low for c in allowed if c.settings[0].source == "paper") == [2.37, 5.77, 14.38, 17.85]
    assert len(allowed) == 6, "and the two records of the public package"
    assert not cell(value=None).may_be_fitted
    assert not dataclasses.replace(cell(), high=4.0).may_be_fitted


@pytest.mark.parametrize(
    "forbidden", [c for c in cells() if not c.may_be_fitted], ids=lambda c: f"{c.table}-{c.method}"
)
def test_no_other_cell_can_reach_a_fit(forbidden: Cell) -> None:
    standard = [c for c in cells() if c.may_be_fitted]
    work = work_of("standard", size=100)
    with pytest.raises(ForbiddenFit, match="to be predicted"):
        fit_all([(cell(), work), (forbidden, work)])
    with pytest.raises(ForbiddenFit):
        fit_constant(forbidden, work, per_token=0.0, per_square=0.0)
    with pytest.raises(ForbiddenFit):
        Model([*standard, forbidden], Works(), SMALL)
    with pytest.raises(ForbiddenFit):
        only_standard([forbidden])


def test_predictions_do_not_depend_on_the_cells_they_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works()

    def predicted() -> list[tuple[float, ...]]:
        model = Model([c for c in cells() if c.may_be_fitted], works, SMALL)
        return [model.predict(c) for c in cells()]

    before = predicted()
    changed = json.loads(json.dumps(reference()))
    for row in changed["throughput"]:
        row["speedup"] = 99.0
        if "odb" in row:
            row["odb"] = 99.0
    for record in changed["public_package"]["records"]:
        if record["method"] == "odb":
            record["runtime_s"] = 1.0
    changed["sorted_baseline"]["speedup"] = 99.0
    monkeypatch.setattr("benchmarks.paper.cells.reference", lambda: changed)
    assert [c.low for c in cells()].count(99.0) == 11
    assert predicted() == before


# ---- work and fits


@pytest.mark.parametrize("method", ["standard", "paper", "odb", "gmt"])
def test_work_costs_what_the_epoch_costs(method: str) -> None:
    settings = Settings(world=3, budget=6000, depth=32, batch_size=2, cutoff=4096)
    epoch = METHODS[method](draw("mm_mix", 301), settings)
    time = StepTime(0.3, 2e-4, 3e-8)
    work = Work.of(epoch)
    assert work.seconds(time) == pytest.approx(time.of_epoch(epoch))
    assert work.emitted == epoch.emitted.total()
    assert work.rate(time) == pytest.approx(epoch.emitted.total() / time.of_epoch(epoch))
    slowest = [max(0.1 * len(m.samples) + 2e-4 * m.padded_tokens for m in step) for step in epoch.steps]
    assert work.seconds(StepTime(0.0, 2e-4), per_sample=0.1) == pytest.approx(sum(slowest))


def test_a_fit_finds_the_constants_that_made_the_rates() -> None:
    time = StepTime(0.21, 3e-4, 5e-8)
    works = [work_of("standard", data, size=2000) for data in ("ultrachat", "llava", "sharegpt4o")]
    fit = fit_all([(cell(value=work.rate(time)), work) for work in works])
    assert dataclasses.astuple(fit.time) == pytest.approx(dataclasses.astuple(time))
    assert fit.terms == ("constant", "per_token", "per_square")
    assert (fit.freedom, max(map(abs, fit.errors))) == (0, pytest.approx(0.0, abs=1e-9))
    alone = fit_constant(cell(value=works[1].rate(time)), works[1], per_token=3e-4, per_square=5e-8)
    assert alone.time.constant == pytest.approx(0.21)


def test_a_constant_is_never_below_zero() -> None:
    works = [work_of("standard", data, size=2000) for data in ("ultrachat", "llava", "sharegpt4o")]
    below = [work.emitted / work.steps / (work.features() @ [-0.1, 3e-4, 5e-8]) for work in works]
    fit = fit_all([(cell(value=rate), work) for rate, work in zip(below, works, strict=True)])
    assert fit.time.constant == 0.0
    assert fit.terms == ("per_token", "per_square")
    assert fit.freedom == 1
    assert max(map(abs, fit.errors)) > 1e-3, "an error is left, and it is told"
    fast = fit_constant(cell(value=1e6), works[0], per_token=3e-4, per_square=0.0)
    assert (fast.time.constant, fast.terms) == (0.0, ())


def test_attention_may_be_given() -> None:
    works = [work_of("standard", data, size=2000) for data in ("ultrachat", "llava", "sharegpt4o")]
    time = StepTime(0.1, 3e-4, 6e-9)
    fit = fit_all([(cell(value=work.rate(time)), work) for work in works], square_ratio=2e-5)
    assert dataclasses.astuple(fit.time) == pytest.approx(dataclasses.astuple(time))
    assert (fit.terms, fit.freedom) == (("constant", "per_token"), 1)


def test_features_refuse_batches_without_one_slowest_rank() -> None:
    with pytest.raises(ValueError, match="slowest in tokens"):
        Work(np.array([[10.0, 9.0]]), np.array([[10.0, 20.0]]), np.ones((1, 2))).features()


# ---- the model


@pytest.fixture(scope="module")
def model() -> Model:
    return Model([c for c in cells() if c.may_be_fitted], Works(), SMALL)


def test_fitted_cells_come_out_as_published(model: Model) -> None:
    fitted = [c for fit in model.fits.values() if fit.freedom == 0 for c in fit.cells]
    assert len(fitted) >= 3
    for c in fitted:
        assert model.predict(c) == (pytest.approx(c.low),)


def test_a_speed_up_is_the_ratio_of_predicted_rates(model: Model) -> None:
    setting = Setting(dataset="sharegpt4o", model="2B", nodes=1)
    speedup = next(c for c in cells() if c.settings == (setting,) and c.quantity == SPEEDUP)
    assert model.predict(speedup)[0] == pytest.approx(model.rate(setting, "odb") / model.rate(setting, "standard"))
    assert model.predict(speedup, ours=True)[0] == pytest.approx(
        model.rate(setting, OURS) / model.rate(setting, "standard")
    )


def test_a_constant_per_sample_leaves_standard_alone_and_slows_odb() -> None:
    works = Works()
    standard = [c for c in cells() if c.may_be_fitted]
    setting = Setting(dataset="mm_mix", model="2B", nodes=1, source="public")
    for batch_size in (1, 2):
        base = dataclasses.replace(SMALL, batch_size=batch_size)
        step, sample = (Model(standard, works, dataclasses.replace(base, per_sample=s)) for s in (0.0, 1.0))
        assert sample.rate(setting, "standard") == pytest.approx(step.rate(setting, "standard"))
        assert sample.rate(setting, "odb") < 0.8 * step.rate(setting, "odb")


def test_scaled_lengths_are_the_same_samples() -> None:
    works = Works()
    scaled = dataclasses.replace(SMALL, means={"llava": 1.5})
    plain = works.lengths(SMALL.profile("llava"), "llava", SMALL)
    assert works.lengths(scaled.profile("llava"), "llava", scaled) == [round(1.5 * n) for n in plain]
    assert len(plain) == 1500


def test_profiles_have_the_papers_variation_and_size() -> None:
    for name, known in reference()["datasets"].items():
        assert PROFILES[name].cv == known["length_cv"]
        assert PROFILES[name].size == known.get("size", reference()["public_package"]["emitted_samples"])


# ---- the tables


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    file = tmp_path_factory.mktemp("paper") / "rows.jsonl"
    assert main(["paper", "--quick", "--json", str(file)]) == 0
    return read_rows([file])


@pytest.mark.slow
def test_quick_run_has_every_table(quick: list[Row]) -> None:
    text = view.tables(quick)
    for title in (*view.TABLES.values(), "Quality", "Constants", "Sensitivity", "Ablations"):
        assert f"### {title}" in text
    kinds = "assumption fit prediction quality record claim sensitivity open attention ablation"
    assert {row.what for row in quick} == set(kinds.split())
    figure = view.plot(quick)
    assert all(axis.lines for axis in figure.axes), "every panel has curves"


@pytest.mark.slow
def test_no_cell_is_invented(quick: list[Row]) -> None:
    """Nothing is measured in this run; whatever stands under `paper` is a figure of `reference.yaml`."""
    text = view.tables(quick)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for head in (i for i, line in enumerate(lines) if "measured here" in line):
        column = lines[head].split(" | ").index("measured here")
        for line in lines[head + 2 :]:
            if line.count(" | ") != lines[head].count(" | ") or "measured here" in line:
                break
            assert not line.split(" | ")[column].strip(), line
    unknown = [r for r in quick if r.what == "prediction" and r.figures["paper_low"] is None]
    assert {(r.data, r.settings["model"], r.method) for r in unknown} == {
        ("sharegpt4o", "2B", "standard"),
        ("sharegpt4o", "2B", "odb"),
        ("ultrachat", "2B", "standard"),
        ("ultrachat", "2B", "odb"),
    }
    assert all("error" not in r.figures for r in unknown)


@pytest.mark.slow
def test_errors_are_of_predictions_only(quick: list[Row]) -> None:
    text = view.tables(quick)
    predictions = [r for r in quick if r.what == "prediction"]
    fitted = [r for r in predictions if r.settings["role"] == "fitted"]
    assert {r.method for r in fitted} == {"standard"}
    assert len(fitted) == 2 * 6, "by both models of step time"
    assert max(abs(r.figures["error"]) for r in fitted if r.settings["time_model"] == "A") < 1e-4
    row = next(r for r in predictions if r.settings["table"] == "Sorted")
    assert row.figures["error"] == pytest.approx(row.figures["simulated_low"] / row.figures["paper_low"] - 1, abs=1e-4)
    assert f"{row.figures['error']:+.1%}" in text, "a bad prediction is shown as it is"
    assert "9 published speed-ups were predicted" in text
    assert "2.46, not in 2.24 to 2.39" in text, "what is published contradicts itself"


def measured_row(tmp_path: Path, method: str, rate: float, **settings: Any) -> Path:
    file = tmp_path / f"{method}.jsonl"
    rows = RowWriter("paper", "python -m benchmarks paper --run x.yaml", file)
    known = {"quantity": RATE, "model": "8B", "nodes": 1, "tuning": "full", "hardware": "8 x Some GPU", **settings}
    figures = {"samples_per_s": rate, "emitted": 100, "train_s": 100 / rate}
    rows.add(what="cell", data="ultrachat", method=method, ranks=8, settings=known, figures=figures)
    rows.close()
    return file


@pytest.mark.slow
def test_measured_rows_fill_their_cells_and_no_other(quick: list[Row], tmp_path: Path) -> None:
    files = [measured_row(tmp_path, "odb", 12.5), measured_row(tmp_path, "standard", 5.0)]
    text = view.tables([*quick, *read_rows(files)])
    table = text.split("### Single node")[1].split("###")[0]
    cells_of = [[part.strip() for part in line.split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert [row[5] for row in cells_of[2:]] == [
        "5.00 (8 x Some GPU)",
        "12.50 (8 x Some GPU)",
        "2.50 (8 x Some GPU)",
    ] + [""] * (len(cells_of) - 5)
    lora = view.tables([*quick, *read_rows([measured_row(tmp_path, "odb", 12.5, tuning="lora")])])
    assert "12.50 (8 x Some GPU)" not in lora


def test_only_measured_cells_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = RowWriter("balance", "x", file)
    rows.add(what="epoch", data="llava", method="odb", figures={})
    rows.close()
    assert main(["paper", "--measured", str(file), "--json", str(tmp_path / "out.jsonl")]) == 2
    assert "no measured cell" in capsys.readouterr().err
    assert main(["paper", "--measured", str(tmp_path / "none"), "--json", str(tmp_path / "out.jsonl")]) == 2
    assert "there are no rows" in capsys.readouterr().err


# ---- a cell for real

RECIPES = Path(__file__).parents[2] / "yaml_recipes"


def test_a_recipe_without_its_data_model_or_gpu_is_refused(tmp_path: Path) -> None:
    recipe = RECIPES / "ultrachat" / "qwen3vl_8b_full.yaml"
    here = ["use_cpu=true", f"dataset_dir={tmp_path}"]
    with pytest.raises(BenchmarkError, match=r"dataset_info\.json, which is not here"):
        prepare(recipe, here, None)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"ultrachat_200k": {"file_name": "u.jsonl"}}))
    with pytest.raises(BenchmarkError, match=r"needs .*u\.jsonl, which is not here"):
        prepare(recipe, here, None)
    with pytest.raises(BenchmarkError, match=r"'other', which .* does not name"):
        prepare(recipe, [*here, "dataset=other"], None)
    (tmp_path / "u.jsonl").write_text("[]")
    with pytest.raises(BenchmarkError, match=r"needs the model no/such-8B"):
        prepare(recipe, [*here, "model_name_or_path=no/such-8B"], None)
    with pytest.raises(BenchmarkError, match="there is no recipe"):
        prepare(tmp_path / "none.yaml", [], None)
    (tmp_path / "tiny-8B").mkdir()
    (tmp_path / "tiny-8B" / "config.json").write_text("{}")
    job = prepare(recipe, [*here, f"model_name_or_path={tmp_path / 'tiny-8B'}"], None)
    assert (job.data, job.model, job.ranks, job.gpus) == ("ultrachat", "8B", 1, False)


def test_a_recipe_for_gpus_is_refused_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(BenchmarkError, match="trains on GPUs"):
        prepare(RECIPES / "llava" / "qwen3vl_2b_full.yaml", [], None)


def test_throughput_is_emitted_samples_over_training_seconds(tmp_path: Path) -> None:
    (tmp_path / "all_results.json").write_text(json.dumps({"train_runtime": 20.0, "train_samples_per_second": 4.05}))
    (tmp_path / "odb_summary.json").write_text(json.dumps({"samples": 90, "tokens": 4000, "padding": 0.1}))
    assert read_run(tmp_path, "odb", None)["samples_per_s"] == 4.5
    assert read_run(tmp_path, "standard", None) == {"samples_per_s": 4.05, "emitted": 81, "train_s": 20.0}
    assert read_run(tmp_path, "packing", 80)["samples_per_s"] == 4.0, "it counts rows: Standard's samples are taken"
    with pytest.raises(BenchmarkError, match="needs a Standard run"):
        read_run(tmp_path, "packing", None)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_demo_is_measured_as_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odb_factory.tools.demo import make_demo

    monkeypatch.chdir(tmp_path)
    make_demo(tmp_path / "odb_demo")
    recipe = RECIPES / "quickstart.yaml"
    file = tmp_path / "cell.jsonl"
    sets = ["--set", "num_train_epochs=1", "max_samples=12"]
    assert main(["paper", "--run", str(recipe), "--json", str(file), *sets]) == 0
    rows = read_rows([file])
    assert [row.method for row in rows] == ["standard", "odb"]
    for row in rows:
        assert row.what == "cell"
        assert row.figures["emitted"] == 12
        assert row.figures["samples_per_s"] == pytest.approx(12 / row.figures["train_s"], rel=1e-3)
        assert row.figures["train_s"] < row.figures["command_s"]
    assert "odb_demo" in view.tables(rows)
