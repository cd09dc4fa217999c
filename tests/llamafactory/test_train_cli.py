"""`llamafactory-cli train` with `odb: true`, as a user runs it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.cli import Finished, train, train_in_turn
from tests.llamafactory.helpers import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BAD = (5, 17)
"""Rows of `mixed` that LLaMA-Factory drops."""


@pytest.fixture(scope="module")
def folder(demo: DemoPaths, media: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set `mixed`: the demo's rows, one with a video, and two that are invalid; and `texts`."""
    folder = tmp_path_factory.mktemp("cli")
    rows = json.loads((demo.data / "odb_demo.json").read_text(encoding="utf-8"))[:30]
    turn = [{"from": "human", "value": "<video>What happens?"}, {"from": "gpt", "value": "noise"}]
    rows.append({"conversations": turn, "images": [], "videos": [media["mp4"]]})
    for place in BAD:
        rows.insert(place, {"conversations": [{"from": "human", "value": "Nobody answers."}], "images": []})
    (folder / "mixed.json").write_text(json.dumps([{"videos": [], **r} for r in rows]), encoding="utf-8")
    texts = json.loads((demo.data / "odb_demo_text.json").read_text(encoding="utf-8"))[:24]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    columns = {"messages": "conversations", "images": "images", "videos": "videos"}
    info = {
        "mixed": {"file_name": "mixed.json", "formatting": "sharegpt", "columns": columns},
        "texts": {
            "file_name": "texts.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations"},
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "images").symlink_to(demo.data / "images")
    return folder


SIZE = 33
"""Rows of `mixed`."""


@pytest.fixture(scope="module")
def recipe(demo: DemoPaths, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        **RECIPE,
        "model_name_or_path": str(demo.model),
        "dataset_dir": str(folder),
        "dataset": "mixed",
        "output_dir": str(tmp_path_factory.mktemp("runs") / "out"),
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "cutoff_len": 1024,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "odb": True,
        "odb_token_budget": 1280,
        "odb_depth": 16,
        "odb_audit": True,
        "odb_timeout": 60,
        "dataloader_num_workers": 1,
    }


@pytest.fixture(scope="module")
def runs(recipe: dict[str, Any], text_model: Path) -> dict[str, Finished | str]:
    """Runs on one rank, one after the other in one process."""
    changes: dict[str, dict[str, Any]] = {
        "full": {
            "lr_scheduler_type": "linear",
            "save_strategy": "epoch",
            "include_num_input_tokens_seen": True,
            "include_effective_tokens_per_second": True,
        },
        "lora": {
            "finetuning_type": "lora",
            "lora_rank": 4,
            "val_size": 0.25,
            "eval_strategy": "epoch",
            "do_eval": True,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
        "freeze": {
            "model_name_or_path": str(text_model),
            "template": "qwen3_nothink",
            "dataset": "texts",
            "finetuning_type": "freeze",
            "freeze_trainable_layers": 1,
            "num_train_epochs": 1.5,
            "dataloader_num_workers": 0,
            "odb_token_budget": None,
            "per_device_train_batch_size": 1,
        },
    }
    recipes = [{**recipe, "output_dir": recipe["output_dir"] + f"-{name}", **changes[name]} for name in changes]
    return dict(zip(changes, train_in_turn(recipes), strict=True))


def good(run: Finished | str) -> Finished:
    assert isinstance(run, Finished), run[-6000:]
    return run


def check_steps(lines: list[dict[str, Any]], budget: int, attention: int) -> None:
    """What must hold of every line of an audit."""
    for line in lines:
        count = len(line["indices"])
        assert line["idle"] == (count == 0)
        assert len(line["lengths"]) == count
        assert line["lengths"] == sorted(line["lengths"])
        assert line["padded_tokens"] <= budget or count == 1
        assert line["padded_tokens"] >= sum(line["lengths"]) >= line["loss_tokens"]
        assert line["padded_tokens"] % 8 == 0
        longest = line["padded_tokens"] // max(1, count)
        assert line["work"] == line["padded_tokens"] + line["padded_tokens"] * longest // attention


def check_totals(run: Finished, lines: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """`odb_summary.json` and the metrics say what the audits say."""
    assert summary["samples"] == sum(len(line["indices"]) for line in lines)
    assert summary["tokens"] == sum(sum(line["lengths"]) for line in lines)
    assert summary["loss_tokens"] == sum(line["loss_tokens"] for line in lines)
    assert summary["padded_tokens"] == sum(line["padded_tokens"] for line in lines)
    assert summary["padding"] == pytest.approx(1 - summary["tokens"] / summary["padded_tokens"], abs=1e-5)
    assert summary["fillers"] == sum(line["idle"] for line in lines)
    assert summary["repeated"] == 0
    results = run.json("train_results.json")
    assert results["train_samples_per_second"] == pytest.approx(
        summary["samples"] / results["train_runtime"], rel=0.01, abs=0.001
    )
    steps = run.json("trainer_state.json")["global_step"]
    assert results["train_steps_per_second"] == pytest.approx(steps / results["train_runtime"], rel=0.01, abs=0.001)


def check_logs(run: Finished) -> None:
    """The estimate of the number of steps ends exact, everywhere."""
    state, last = run.json("trainer_state.json"), run.lines("trainer_log.jsonl")[-1]
    assert state["max_steps"] == state["global_step"] == last["total_steps"] == last["current_steps"]
    assert last["percentage"] == 100
    handled = round(state["epoch"] * run.json("odb_summary.json")["dataset_size"])
    assert f"{handled}/{handled} [" in run.log, "the progress bar counts samples and ends full"
    assert "Instantaneous batch size" not in run.log
    losses = run.history("loss")
    assert len(losses) == state["global_step"]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)


def check_said_once(run: Finished) -> None:
    """What a run begins and ends with. Further runs of one process log less: transformers sees to that."""
    assert run.log.count("Online Dynamic Batching: up to") == 1
    assert run.log.count("Online Dynamic Batching, all ranks:") == 1


def test_full_run(runs: dict[str, Finished | str]) -> None:
    run = good(runs["full"])
    lines, summary, results = run.audit(), run.json("odb_summary.json"), run.json("train_results.json")
    check_steps(lines, 1280, run.json("odb_summary.json")["attention_length"])
    check_totals(run, lines, summary)
    check_logs(run)
    check_said_once(run)

    seen = Counter(index for line in lines for index in line["indices"])
    assert seen == Counter(set(range(SIZE)) - set(BAD))
    assert summary["epochs"] == 1
    assert summary["unique"] == SIZE - len(BAD)
    assert summary["dropped"] == {"invalid conversation": len(BAD)}
    assert [d["index"] for d in summary["dropped_samples"]] == list(BAD)
    assert [line["step"] for line in lines] == list(range(summary["steps"]))
    assert run.json("trainer_state.json")["global_step"] == summary["steps"] > 3

    # progress, and the learning rate with it, follows the samples
    handled = list(
        itertools.accumulate(
            len(line["indices"]) + sum(d[1] == "invalid conversation" for d in line.get("dropped", ()))
            for line in lines
        )
    )
    epochs, rates = run.history("epoch")[: len(lines)], run.history("learning_rate")
    assert epochs[:-1] == pytest.approx([h / SIZE for h in handled[:-1]])
    assert epochs[-1] == 1
    assert rates == pytest.approx([1e-3 * (1 - h / SIZE) for h in [0, *handled[:-1]]])
    scheduler = torch.load(run.output / f"checkpoint-{summary['steps']}" / "scheduler.pt", weights_only=False)
    assert set(scheduler["_last_lr"]) == {0.0}  # no step is wasted behind the end, none is missing

    assert run.json("trainer_state.json")["num_input_tokens_seen"] == summary["padded_tokens"]
    assert results["effective_tokens_per_sec"] == pytest.approx(summary["tokens"] / results["train_runtime"], rel=0.01)
    losses = run.history("loss")
    assert losses[0] == pytest.approx(math.log(1024), abs=0.4)
    assert losses[-1] < losses[0]
    assert "training example:" in run.log
    window = r"windows of 16 samples or [\d,]+ MiB \(odb_window_bytes\) a rank \(an epoch begins with 2, 4, 8\)"
    attention = rf"attention counts as much as all else in rows of {summary['attention_length']:,} tokens"
    more = f"rule carry, assignment shared; {attention}; 1 rank; an update is 1 micro-batch a rank[.]"
    assert re.search(f"up to 1,280 padded tokens a micro-batch, {window}; {more}", run.log)
    assert (run.output / "odb_report.png").stat().st_size > 20_000


def test_lora_with_evaluation(runs: dict[str, Finished | str]) -> None:
    run = good(runs["lora"])
    lines, summary = run.audit(), run.json("odb_summary.json")
    check_steps(lines, 1280, run.json("odb_summary.json")["attention_length"])
    check_totals(run, lines, summary)
    check_logs(run)
    for_training = SIZE - math.ceil(SIZE * 0.25)
    assert sum(len(line["indices"]) for line in lines) + sum(summary["dropped"].values()) == for_training
    assert max(Counter(index for line in lines for index in line["indices"]).values()) == 1
    # evaluation goes through LLaMA-Factory's own map, collator and fixed batches
    assert "Running tokenizer on dataset" in run.log
    assert "eval example:" in run.log
    (during,) = run.history("eval_loss")
    after = run.json("eval_results.json")
    assert after["eval_loss"] == pytest.approx(during)
    assert 5 < during < 8
    held_out = round(after["eval_samples_per_second"] * after["eval_runtime"])
    assert SIZE - for_training - len(BAD) <= held_out <= SIZE - for_training
    assert {"adapter_model.safetensors", "adapter_config.json"} <= run.files()


def test_frozen_text_model(runs: dict[str, Finished | str], text_model: Path) -> None:
    run = good(runs["freeze"])
    lines = run.audit()
    check_steps(lines, 1024, run.json("odb_summary.json")["attention_length"])  # 1 x cutoff_len
    check_totals(run, lines, run.json("odb_summary.json"))
    check_logs(run)
    first = [index for line in lines if line["epoch"] == 0 for index in line["indices"]]
    half = [index for line in lines if line["epoch"] == 1 for index in line["indices"]]
    assert sorted(first) == list(range(24))
    assert len(half) == len(set(half)) >= 12
    before, after = load_file(text_model / "model.safetensors"), load_file(run.output / "model.safetensors")
    changed = {name.split(".")[2] for name in before if not before[name].equal(after[name])}
    assert changed == {"2"}  # the last layer, and nothing else


@pytest.mark.distributed
def test_two_ranks(recipe: dict[str, Any]) -> None:
    changes = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 4,
        "ddp_backend": "gloo",
        "odb_token_budget": 900,
        "report_to": "tensorboard",
    }
    board = {"LLAMABOARD_ENABLED": "1", "LLAMABOARD_WORKDIR": recipe["output_dir"]}  # as LLaMA Board starts a run
    run = train({**recipe, **changes}, ranks=2, **board)
    audits, summary = [run.audit(rank) for rank in range(2)], run.json("odb_summary.json")
    assert len(audits[0]) == len(audits[1])
    for lines in audits:
        check_steps(lines, 900, summary["attention_length"])
    check_totals(run, audits[0] + audits[1], summary)
    check_logs(run)
    check_said_once(run)
    updates = 0
    for epoch in range(2):
        steps = [[line for line in lines if line["epoch"] == epoch] for lines in audits]
        assert [line["step"] for line in steps[0]] == [line["step"] for line in steps[1]]
        seen = Counter(index for rank in steps for line in rank for index in line["indices"])
        assert seen == Counter(set(range(SIZE)) - set(BAD))
        assert all(any(line["indices"] for line in rank) for rank in steps)
        assert len(steps[0]) % 4 == 0  # fillers complete the last update
        updates += len(steps[0]) // 4
    assert any(one["idle"] and other["idle"] for one, other in zip(*audits, strict=True))  # there was a remainder
    state = run.json("trainer_state.json")
    assert state["global_step"] == updates > 2
    assert state["epoch"] == 2
    assert summary["steps"] == len(audits[0])
    assert summary["epochs"] == 2
    assert summary["unique"] == SIZE - len(BAD)
    assert summary["dropped"] == {"invalid conversation": 2 * len(BAD)}
    losses = run.history("loss")
    assert losses[0] == pytest.approx(math.log(1024), abs=0.4)
    assert losses[-1] < losses[0]
    figures = expected_figures(audits)
    check_figures(run, figures, summary)
    check_tensorboard(run, figures)
    check_board(run, audits)


EXACT = ("padding", "samples_per_step", "samples_per_update", "filler_share", "imbalance")
"""Figures that the audits give too."""

MEASURED = (
    "samples_per_second",
    "tokens_per_second",
    "padded_tokens_per_second",
    "data_wait",
    "window_samples",
    "window_bytes",
    "align_ms",
)


def expected_figures(audits: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    """For each update, what the audits of all ranks say of it, and then for the whole run."""
    steps = list(zip(*audits, strict=True))
    updates = [[step for step in steps if step[0]["update"] == u] for u in sorted({s[0]["update"] for s in steps})]
    return [_figures(update) for update in (*updates, steps)]


def _figures(steps: list[tuple[dict[str, Any], ...]]) -> dict[str, float]:
    lines = [line for step in steps for line in step]
    padded = sum(line["padded_tokens"] for line in lines)
    tokens = sum(sum(line["lengths"]) for line in lines)
    samples = sum(len(line["indices"]) for line in lines)
    work = sum(line["work"] for line in lines)
    slowest = sum(max(line["work"] for line in step) for step in steps)
    return {
        "padding": 1 - tokens / padded,
        "samples_per_step": samples / len(steps),
        "samples_per_update": samples / len({step[0]["update"] for step in steps}),
        "filler_share": sum(line["idle"] for line in lines) / len(lines),
        "imbalance": 1 - work / (len(steps[0]) * slowest),
        "tokens_per_sample": tokens / samples,
        "padded_tokens_per_sample": padded / samples,
    }


def check_figures(run: Finished, expected: list[dict[str, float]], summary: dict[str, Any]) -> None:
    """Each logged update, and the summary, have all figures, and those that the audits give too are the same."""
    logged = [line for line in run.lines("trainer_log.jsonl") if "loss" in line]
    assert len(logged) == len(expected) - 1
    for line, figures in zip(logged, expected, strict=False):
        _check_one({name.removeprefix("odb/"): v for name, v in line.items() if name.startswith("odb/")}, figures)
    _check_one({name: summary[name] for name in (*EXACT, *MEASURED)}, expected[-1])
    assert 0 < summary["training_seconds"] < run.json("train_results.json")["train_runtime"]
    assert summary["samples"] / summary["training_seconds"] == pytest.approx(summary["samples_per_second"], rel=1e-3)


def _check_one(found: dict[str, float], expected: dict[str, float]) -> None:
    assert set(found) == {*EXACT, *MEASURED}
    for name in EXACT:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    each = found["samples_per_second"]
    assert found["tokens_per_second"] == pytest.approx(each * expected["tokens_per_sample"], rel=1e-4)
    assert found["padded_tokens_per_second"] == pytest.approx(each * expected["padded_tokens_per_sample"], rel=1e-4)
    assert 0 <= found["data_wait"] <= 1
    assert 0 <= found["window_samples"] <= 16
    assert (found["window_bytes"] > 0) == (found["window_samples"] > 0)
    assert found["align_ms"] >= 0


def check_tensorboard(run: Finished, expected: list[dict[str, float]]) -> None:
    """The event files hold every figure of every logged update."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run.output / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    for name in (*EXACT, *MEASURED):
        values = [event.value for event in events.Scalars(f"train/odb/{name}")]
        assert len(values) == len(expected) - 1, name
        if name in EXACT:
            assert values == pytest.approx([figures[name] for figures in expected[:-1]], abs=1e-5), name


def check_board(run: Finished, audits: list[list[dict[str, Any]]]) -> None:
    """LLaMA Board reads its progress from the trainer's log: the share of the samples that are done."""
    from llamafactory.webui.control import get_trainer_info

    done, shares = 0, {}
    for step in zip(*audits, strict=True):
        done += sum(len(line["indices"]) + len(line.get("dropped", ())) for line in step)
        shares[step[0]["update"]] = 100 * done / (2 * SIZE)
    lines = [line for line in run.lines("trainer_log.jsonl") if "loss" in line]
    found = {line["current_steps"]: line["percentage"] for line in lines}
    ends = {step[0]["update"] for step in zip(*audits, strict=True) if step[0]["epoch"] == 0}
    assert found[max(ends)] == pytest.approx(50, abs=0.01), "an epoch of two is done"
    assert found == pytest.approx(shares, abs=100 * len(BAD) / SIZE)
    assert list(found.values()) == sorted(found.values())
    text, slider, _ = get_trainer_info("en", str(run.output), True)
    assert slider.value == 100
    assert re.fullmatch(r"Running (\d+)/\1: [\d:]+ < 0:00:00", slider.label)
    assert text.count("Online Dynamic Batching: up to") == 1, "the running log, too"
