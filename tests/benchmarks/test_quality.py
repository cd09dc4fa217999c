"""The benchmark `quality`: the task has right answers, the score finds them, the view tells means and spread."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.errors import BenchmarkError
from benchmarks.quality.methods import OWN, Size, recipe
from benchmarks.quality.run import FULL, QUICK, read_training
from benchmarks.quality.score import answer_loss, greedy
from benchmarks.quality.task import CUTOFF, make_model, make_samples, make_tokenizer, prompt_text
from benchmarks.quality.view import plot, spread, tables
from benchmarks.rows import Row, read_rows

TRAIN, HELD_OUT, TUNING = make_samples(600, 200, seed=1)


def test_answers_are_right() -> None:
    for sample in (*TRAIN, *HELD_OUT):
        words, answer = sample.question.split(), [int(word) for word in sample.answer.split()]
        if sample.task == "largest":
            assert answer == [max(map(int, words[2:]))]
        else:
            step = int(words[5]) * (1 if words[1] == "up" else -1)
            assert answer[0] == int(words[3])
            assert {after - before for before, after in pairwise(answer)} <= {step}
            assert not 0 <= answer[-1] + step < 128, "it goes on to the end"


def test_held_out_questions_are_new_and_of_both_tasks() -> None:
    questions = [{s.question for s in part} for part in (TRAIN, HELD_OUT, TUNING)]
    assert not any(a & b for a, b in combinations(questions, 2))
    assert len({s.question for s in TRAIN}) == 600
    assert [s.task for s in HELD_OUT].count("count") == 100
    assert make_samples(600, 200, seed=1) == (TRAIN, HELD_OUT, TUNING)
    assert make_samples(600, 200, seed=2) != (TRAIN, HELD_OUT, TUNING)
    with pytest.raises(ValueError, match="at most"):
        make_samples(10_000, 10, seed=0)


def test_the_full_size_fits_the_task() -> None:
    samples, held_out, _ = make_samples(FULL.samples, FULL.held_out, 0)
    assert (len(samples), len(held_out)) == (FULL.samples, FULL.held_out)
    assert FULL.samples % FULL.samples_per_update == 0, "Standard would repeat samples to fill its last update"
    assert QUICK.samples % QUICK.samples_per_update == 0


def test_lengths_are_uneven_and_none_is_cut_off(tmp_path: Path) -> None:
    """By LLaMA-Factory's own preprocessing, whose prompt is the one that is scored."""
    from benchmarks.encoding import encode

    make_model(tmp_path, seed=0, layers=1, hidden=16)
    tokenizer = make_tokenizer()
    turns = [[{"from": "human", "value": s.question}, {"from": "gpt", "value": s.answer}] for s in TRAIN]
    encoded = encode(tmp_path, turns, 4096)
    for sample, ids, labels in zip(TRAIN, encoded.input_ids, encoded.labels, strict=True):
        prompt = tokenizer.encode(prompt_text(sample), add_special_tokens=False)
        answer = [*tokenizer.encode(sample.answer, add_special_tokens=False), tokenizer.eos_token_id]
        assert ids == prompt + answer
        assert [label for label in labels if label != -100] == answer
    lengths = torch.tensor(encoded.lengths, dtype=torch.float64)
    assert lengths.max() < CUTOFF
    assert lengths.std() / lengths.mean() > 0.4


class Successor:
    """Stands for a model that is sure that each token is followed by the next id."""

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 10)
        logits.scatter_(2, ((input_ids + 1) % 10).unsqueeze(2), math.log(9))  # probability 1/2, others 1/18 each
        return SimpleNamespace(logits=logits)


def test_the_loss_is_that_of_the_answers_tokens() -> None:
    loss, tokens = answer_loss(Successor(), [[1, 2], [7, 1, 4]], [[3, 4, 9], [5]])
    assert tokens == 4
    assert loss == pytest.approx(3 * math.log(2) + math.log(18), rel=1e-5)


def test_greedy_answers_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model(tmp_path, seed=3, layers=1, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = [[5, 6, 7, 8, 9], [1], [100, 20, 30]]
    together = greedy(model, prompts, 6, end=-1, pad=0)
    for prompt, answer in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == ids[len(prompt) :]


def test_recipes_differ_in_the_batching_alone() -> None:
    size = Size(samples=64, held_out=8, epochs=2)
    made = {
        method: recipe(Path("p"), method, size, output=Path("o"), seed=1, rate=1e-3, more_samples=4.0) for method in OWN
    }
    common = made["standard"].items()
    added = {method: dict(values.items() - common) for method, values in made.items()}
    assert made["standard"]["gradient_accumulation_steps"] == 4
    assert [name for name, values in made.items() if "gradient_accumulation_steps" not in values] == [
        "odb same samples"
    ]
    assert added == {
        "standard": {},
        "sorted": {"train_sampling_strategy": "group_by_length"},
        "packing": {"packing": True, "neat_packing": True},
        "odb": {"odb": True},
        "odb same samples": {"odb": True, "odb_samples_per_update": 16},
        "odb scaled rate": {"odb": True, "learning_rate": 2e-3},
    }


def test_a_training_that_fell_short_is_refused(tmp_path: Path) -> None:
    size = Size(samples=64, held_out=8, epochs=2)
    (tmp_path / "all_results.json").write_text(json.dumps({"train_loss": 1.5, "train_runtime": 3.0}))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"epoch": 2.0, "global_step": 4}))
    assert read_training(tmp_path, size)["samples_per_update"] == 32
    (tmp_path / "trainer_state.json").write_text(json.dumps({"epoch": 1.5, "global_step": 4}))
    with pytest.raises(BenchmarkError, match=r"1\.5 epochs instead of 2"):
        read_training(tmp_path, size)


def row(method: str, seed: int, loss: float, exact: float, updates: int = 0, what: str = "score") -> Row:
    figures: dict[str, Any] = {"eval_loss": loss, "exact_match": exact, "exact_count": exact}
    if updates:
        figures |= {"updates": updates, "samples_per_update": 9600 / updates}
    settings = {"learning_rate": 1e-3 if updates else None, "samples": 3200, "epochs": 3, "held_out": 400, "ranks": 2}
    return Row(
        benchmark="quality",
        what=what,
        data="x",
        method=method,
        seed=seed,
        budget=640,
        settings=settings,
        figures=figures,
    )


def test_tables_give_mean_and_spread() -> None:
    rows = [row("untrained", 0, 5.0, 0.0), row("standard", 0, 0.2, 0.5, 600), row("standard", 1, 0.4, 0.7, 600)]
    rows += [row("odb", 0, 0.5, 0.3, 300), row("standard", 0, 0.9, 0.1, 600, what="tuning")]
    text = tables(rows)
    assert "| standard | 2 | 600 | 1.00 | 16.0 | 0.001 | 0.300 ± 0.141 | 60.0 ± 14.1 % |" in text
    assert "| odb | 1 | 300 | 0.50 | 32.0 | 0.001 | 0.500 | 30.0 % |" in text
    assert "| untrained | 1 | 0 |" in text
    assert "| 0.001 | 0.900 | 10.0 % |" in text
    assert "| odb | 1 | 300 |  | 32.0 |" in tables(rows[3:4]), "no ratio without Standard"
    assert tables(rows[-1:]).startswith("Standard with other learning rates")
    assert len(plot(rows).axes) == 2
    assert spread([1.0]) == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert main(["quality", "--quick", "--json", str(file), "--work-dir", str(tmp_path / "work")]) == 0
    untrained, standard, odb = read_rows([file])
    assert [one.method for one in (untrained, standard, odb)] == ["untrained", "standard", "odb"]
    assert standard.figures["updates"] == QUICK.samples / QUICK.samples_per_update
    assert odb.figures["updates"] < standard.figures["updates"]  # type: ignore[operator]
    for one in (standard, odb):
        assert one.figures["eval_loss"] < untrained.figures["eval_loss"]  # type: ignore[operator]
    assert "| odb |" in tables([untrained, standard, odb])
