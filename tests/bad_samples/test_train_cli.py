"""Bad samples in a run of `llamafactory-cli train`, as a user meets them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo import DemoPaths
from tests.bad_samples.kinds import make_media
from tests.llamafactory.cli import Finished, train_in_turn
from tests.llamafactory.helpers import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GOOD = 14


def talk(*turns: str | None, **media: list[str]) -> dict[str, Any]:
    """A row of a ShareGPT file."""
    conversation = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"conversations": conversation, "images": [], "videos": [], "audios": [], **media}


BAD: dict[int, tuple[dict[str, Any], str, str]] = {
    0: (talk("<image>First?", "?", images=["cut.jpg"]), "corrupt image", r"cut\.jpg: OSError: image file is trunc"),
    3: (talk("<image>What?", "?", images=["gone.jpg"]), "missing image", r"there is no file gone\.jpg$"),
    4: (talk("<video>What?", "?", videos=["garbage.mp4"]), "undecodable video", "Invalid data found"),
    8: (talk("Hello", None), "template error", "content of type NoneType instead of text"),
    9: (talk("Write <image>.", "ok"), "placeholder mismatch", "images: 0, <image> in its text: 1"),
    12: (
        talk("<image>Large?", "yes", images=["large.png"]),
        "truncated media",
        "image tokens .*was cut at cutoff_len 96",
    ),
    15: (talk("<audio>What?", "?", audios=["tone.wav"]), "audio", "has audio, which odb does not support"),
    17: (talk("Nobody answers."), "invalid conversation", "it has 0 prompt and 0 response messages"),
}
"""By row: the row, the reason, and a regular expression of the cause."""


@pytest.fixture(scope="module")
def folder(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set `several` with all of `BAD`, and `one` with a single bad row."""
    folder = tmp_path_factory.mktemp("data")
    make_media(folder)
    several = [talk(f"What is {i} + 1?", " ".join(["sum"] * (1 + i % 7))) for i in range(GOOD)]
    for place, (row, *_) in BAD.items():
        several.insert(place, row)
    one = [talk(f"<image>What is in picture {i}?", "noise", images=["small.png"]) for i in range(GOOD)]
    one[5] = talk("<image>What is in the picture that was not copied to its end?", "who knows", images=["cut.png"])
    columns = {"messages": "conversations", "images": "images", "videos": "videos", "audios": "audios"}
    info = {}
    for name, rows in (("several", several), ("one", one)):
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(demo: DemoPaths, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished | str]:
    """Two runs in one process: `skip` with several kinds of bad samples, `raise` with one."""
    output = tmp_path_factory.mktemp("runs")
    recipe = {
        **RECIPE,
        "model_name_or_path": str(demo.model),
        "dataset_dir": str(folder),
        "cutoff_len": 96,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "odb": True,
        "odb_token_budget": 192,
        "odb_depth": 4,
        "odb_audit": True,
        "odb_timeout": 60,
        "dataloader_num_workers": 1,
    }
    changes: dict[str, dict[str, Any]] = {
        "skip": {"dataset": "several", "odb_on_bad_sample": "skip", "odb_max_bad_samples": len(BAD)},
        "raise": {"dataset": "one"},
    }
    recipes = [{**recipe, "output_dir": str(output / name), **change} for name, change in changes.items()]
    return dict(zip(changes, train_in_turn(recipes), strict=True))


def test_skip_trains_on_the_rest_and_reports_each(runs: dict[str, Finished | str]) -> None:
    run = runs["skip"]
    assert isinstance(run, Finished), run[-6000:]
    summary, lines = run.json("odb_summary.json"), run.audit()
    assert Counter(i for line in lines for i in line["indices"]) == Counter(set(range(GOOD + len(BAD))) - set(BAD))
    assert summary["unique"] == summary["samples"] == GOOD
    assert summary["repeated"] == 0
    assert summary["dropped"] == dict(sorted(Counter(reason for _, reason, _ in BAD.values()).items()))
    assert summary["bad"] == len(BAD) - 1
    assert [entry["index"] for entry in summary["dropped_samples"]] == list(BAD)
    for entry in summary["dropped_samples"]:
        _, reason, cause = BAD[entry["index"]]
        assert entry["reason"] == reason
        assert entry["bad"] is (reason != "invalid conversation")
        assert entry["detail"].startswith(f"row {entry['index']} of the training split")
        assert re.search(cause, entry["detail"]), entry["detail"]
    in_steps = {index: reason for line in lines for index, reason, *_ in line.get("dropped", ())}
    assert in_steps.items() <= {index: reason for index, (_, reason, _) in BAD.items()}.items()
    assert len(in_steps) >= len(BAD) - 1  # what is found behind the last step is in the summary alone
    assert "training example:" in run.log  # the first row is bad, and passed over


def test_raise_ends_the_run_with_a_sentence_that_says_which_row(runs: dict[str, Finished | str]) -> None:
    log = runs["raise"]
    assert isinstance(log, str), "the run must fail"
    (sentence,) = re.findall(r"^.*SampleError: .*$", log, re.MULTILINE)
    assert re.fullmatch(
        r"odb_factory\.runtime\.errors\.SampleError: rank 0: sample 5 could not be read: row 5 of the training split, "
        r'"<image>What is in the picture that was n\.\.\.", \S+cut\.png: corrupt image: \S+cut\.png: '
        r"OSError: image file is truncated",
        sentence,
    ), sentence
    assert "BadSample: corrupt image" in log  # where it came from, for who wants to know
