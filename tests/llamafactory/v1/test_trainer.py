"""The trainer class that stands for v1's: what it leaves alone, and what it refuses before anything is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.llamafactory.v1.helpers import data_of


class Args:
    batching_strategy = "normal"


def test_a_subclass_with_another_strategy_is_what_its_author_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory.v1.core.base_trainer import BaseTrainer
    from llamafactory.v1.trainers.sft_trainer import SFTTrainer

    said: list[Any] = []
    monkeypatch.setattr(BaseTrainer, "__init__", lambda self, args, **kwargs: said.append((args, kwargs)))
    monkeypatch.setattr(BaseTrainer, "fit", lambda self: said.append("fit"))
    monkeypatch.setattr(BaseTrainer, "_create_batch_generator", lambda self: said.append("generator"))

    class Mine(SFTTrainer):
        def compute_loss(self, batch: Any) -> Any:
            return "mine"

    args = Args()
    trainer = Mine(args=args, model=1)
    trainer._create_batch_generator()
    trainer.fit()
    assert isinstance(trainer, SFTTrainer)
    assert trainer.compute_loss(None) == "mine"
    assert said == [(args, {"model": 1}), "generator", "fit"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "",
            r"\S+ \(resume_from_checkpoint\) is no checkpoint, but an output_dir that holds "
            r"checkpoint-9, checkpoint-4: resume from \S+checkpoint-4, the last complete one\.",
        ),
        (
            "checkpoint-9",
            r"\S+-9 .* is no complete checkpoint, for it has no CHECKPOINT_COMPLETE; resume from another one",
        ),
    ],
)
def test_what_is_no_complete_checkpoint_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    from llamafactory.v1.trainers.sft_trainer import SFTTrainer

    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "CHECKPOINT_COMPLETE").touch()
    (tmp_path / "checkpoint-9").mkdir()
    args = SimpleNamespace(batching_strategy="odb", resume_from_checkpoint=str(tmp_path / name))
    with pytest.raises(ValueError, match=f"^{sentence}"):
        SFTTrainer(args)


def test_checks_of_stock_stay() -> None:
    from odb_factory.llamafactory.v1.generator import OdbBatchGenerator

    with pytest.raises(ValueError, match="Drop last must be True"):
        OdbBatchGenerator([], None, drop_last=False, trainer=None)
    with pytest.raises(ValueError, match="Global batch size must be divisible by DP size and micro batch size"):
        OdbBatchGenerator([], None, micro_batch_size=2, global_batch_size=3, trainer=None)


PAIR = {"chosen": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "three"}]}
PAIR["rejected"] = PAIR["chosen"]
ROW = {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "three"}]}


def failing(code: str, *arguments: str) -> str:
    """What a fresh Python that fails says last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "streaming", "sentence"),
    [
        ("sft", True, "odb does not support streaming, since an epoch must be known to train on each sample once"),
        ("rm", False, "odb works with `llamafactory-cli sft` only; choose another strategy for this trainer"),
    ],
)
def test_refused_in_one_sentence(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, streaming: bool, sentence: str
) -> None:
    monkeypatch.setenv("USE_V1", "1")
    data = Path(data_of(tmp_path, [PAIR if command == "rm" else ROW] * 4))
    listed = data.read_text() + f"  streaming: {str(streaming).lower()}\n"
    data.write_text(listed.replace("sharegpt", "pair") if command == "rm" else listed)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {text_model}\ntrain_dataset: {data}\nbatching_strategy: odb\nbatching_workers: 0\n"
        f"output_dir: {tmp_path / 'out'}\ntemplate: qwen3_nothink\n"
    )
    said = failing("from llamafactory.cli import main; main()", command, str(recipe))
    assert sentence in said


@pytest.mark.slow
def test_a_run_whose_samples_are_all_dropped_ends_with_the_reason(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_V1", "1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {text_model}\ntrain_dataset: {data_of(tmp_path, [ROW] * 4)}\nbatching_strategy: odb\n"
        f"odb_token_budget: 2\nodb_overlong: drop\ncutoff_len: 64\nbatching_workers: 0\nbf16: false\n"
        f"output_dir: {tmp_path / 'out'}\ntemplate: qwen3_nothink\n"
    )
    said = failing("from llamafactory.cli import main; main()", "sft", str(recipe))
    assert "SampleError: rank 0: all 4 samples of this epoch were dropped" in said
    assert "(overlong): " in said


@pytest.mark.slow
def test_modules_run_by_name_as_without_us() -> None:
    """`python -m` asks a module's loader for its code."""
    for module in ("llamafactory.v1.trainers.sft_trainer", "llamafactory.v1.utils.plugin"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=100, check=False
        )
        assert "get_code" not in done.stderr
        assert done.returncode == 0, done.stderr[-2000:]
