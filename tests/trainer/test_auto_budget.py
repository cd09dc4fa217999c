"""`odb_token_budget: auto` in a Trainer: what it finds holds, all ranks find the same, and nothing is left behind."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.core.budget_search import Probe
from odb_factory.core.group_shapes import Bounds, GroupShape, group_shapes
from odb_factory.runtime.errors import OdbError
from odb_factory.tools.demo.model import make_text_model
from odb_factory.trainer.auto_budget import BudgetReport, NoBudgetError
from odb_factory.trainer.options import AutoBudget
from odb_factory.trainer.out_of_memory import is_out_of_memory
from tests.dist import RankFailure, run_ranks
from tests.trainer.engines import import_deepspeed, zero_config
from tests.trainer.test_exact_trainer import SIZE, VOCABULARY, Collect, _audit_updates, _check_gradients
from tests.trainer.tiny import KeepDouble, MaskedSamples, free_port, launch_like_torchrun, pad_collate

MB = 2**20
LONGEST = 64
DEPTH = 16
LIMIT = 40 * MB


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


def make_batch(shape: GroupShape) -> dict[str, torch.Tensor]:
    return pad_collate([{"input_ids": [7] * length, "labels": [7] * length} for length in shape.lengths])


def auto(limit: int | None = LIMIT, **more: Any) -> AutoBudget:
    return AutoBudget(make_batch=make_batch, longest=LONGEST, memory_limit=limit, **more)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def make_trainer(
    path: Path,
    output: Path,
    how: AutoBudget | None,
    *,
    budget: int = 120,
    dtype: Any = torch.float32,
    overlong: str = "keep",
    data: Any = None,
    **arguments: Any,
) -> OdbTrainer:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "seed": 3,
    }
    args = TrainingArguments(str(output), **(defaults | arguments))
    # dropout, so that the random state matters
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attention_dropout=0.1)
    return OdbTrainer(
        model=model,
        args=args,
        train_dataset=data or MaskedSamples(SIZE, VOCABULARY),
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=budget, depth=DEPTH, overlong=overlong),
        odb_auto_budget=how,
        odb_audit=True,
    )


@dataclass
class Outcome:
    """What a run has to say."""

    budget: int
    report: BudgetReport | None
    losses: list[float]
    weights: dict[str, torch.Tensor]
    random: list[Any]
    summary: dict[str, Any]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def run(trainer: OdbTrainer) -> Outcome:
    collect = Collect()
    trainer.add_callback(collect)
    trainer.train()
    return Outcome(
        budget=trainer.odb_config.token_budget,
        report=trainer.odb_auto_budget,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        weights={n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        random=[random.random(), float(np.random.rand()), float(torch.rand(()))],
        summary=trainer.odb_summary,
        gradients=collect.gradients,
    )


def assert_same_run(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.random == other.random
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (LIMIT, {}),
    "accumulation": (LIMIT, {"gradient_accumulation_steps": 3}),
    "checkpointing": (22 * MB, CHECKPOINTING),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_is_as_if_the_budget_had_been_given(text_model: Path, tmp_path: Path, way: str) -> None:
    limit, arguments = WAYS[way]
    found = run(make_trainer(text_model, tmp_path / "auto", auto(limit), **arguments))
    assert found.report is not None
    assert found.budget == found.report.token_budget == found.summary["token_budget"]
    assert found.budget % 64 == 0
    assert LONGEST < found.budget < DEPTH * LONGEST, "the limit should bind, and leave some room"
    given = run(make_trainer(text_model, tmp_path / "given", None, budget=found.budget, **arguments))
    assert given.report is None
    assert_same_run(found, given)


def measured_peak(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that forward and backward allocate at most, as torch's allocator reports them to the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        model(**inputs).loss.backward()
    events = seen.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    model.zero_grad(set_to_none=True)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("headroom", [0.0, 0.1, 0.3])
def test_the_worst_step_fits_and_that_of_a_larger_budget_does_not(
    text_model: Path, tmp_path: Path, headroom: float
) -> None:
    trainer = make_trainer(text_model, tmp_path, auto(headroom=headroom), max_steps=1)
    found = run(trainer).budget
    model = AutoModelForCausalLM.from_pretrained(text_model, attention_dropout=0.1).train()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    held = 3 * weights + sum(b.numel() * b.element_size() for b in model.buffers())  # and two states of AdamW
    bounds = Bounds(longest=LONGEST, most_samples=DEPTH)

    def need(budget: int) -> int:
        return held + max(measured_peak(model, make_batch(shape)) for shape in group_shapes(budget, bounds))

    allowed = LIMIT * (1 - headroom)
    assert need(found) <= allowed * 1.001
    assert need(found + 64) > allowed * 0.999, "a larger budget would have fitted too"


def test_a_limit_that_nothing_fits_into_is_refused(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, auto(9 * MB))
    with pytest.raises(NoBudgetError) as error:
        trainer.train()
    text = str(error.value)
    assert text.startswith("odb_token_budget: auto: a sample of 64 tokens (cutoff_len) needs about ")
    assert "but a rank may use 8 MiB (9 MiB without odb_auto_headroom 0.1); lower cutoff_len" in text
    assert text.count(".") - text.count("0.1") == 1, "one sentence"
    assert not (tmp_path / "odb_audit.rank0.jsonl").exists()


def test_without_a_limit_the_data_bound_the_budget(text_model: Path, tmp_path: Path) -> None:
    found = run(make_trainer(text_model, tmp_path, auto(None), max_steps=1))
    assert found.budget == DEPTH * LONGEST
    assert found.report is not None
    assert found.report.capacity > LIMIT
    line = found.report.recipe_line
    assert line.startswith(f"odb_token_budget: {found.budget}  # found by auto: ")


def test_it_is_found_anew_when_a_run_is_resumed(text_model: Path, tmp_path: Path) -> None:
    first = make_trainer(text_model, tmp_path, auto(), save_strategy="steps", save_steps=1, max_steps=2)
    before = run(first)
    again = make_trainer(text_model, tmp_path, auto(36 * MB), save_strategy="no", num_train_epochs=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.odb_auto_budget is not None
    assert again.odb_auto_budget.pending == 0, "the optimizer's states have been loaded"
    assert 0 < again.odb_config.token_budget < before.budget
    assert again.odb_summary["unique"] == SIZE


class Hungry:
    """Asks for more memory than there is in batches above a number of tokens."""

    def __init__(self, above: int) -> None:
        self.above = above
        self.tried: list[int] = []

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"].numel()
        self.tried.append(tokens)
        if tokens > self.above:
            torch.empty(2**60, dtype=torch.uint8)


def test_a_step_that_runs_out_of_memory_counts_as_too_large(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path / "auto", auto(None))
    hungry = Hungry(400)
    trainer.model.register_forward_pre_hook(hungry, with_kwargs=True)
    found = run(trainer)
    assert found.budget == 384
    assert max(hungry.tried) > 400, "a step should have failed"
    assert_same_run(found, run(make_trainer(text_model, tmp_path / "given", None, budget=384)))


def test_other_errors_are_not_taken_for_a_lack_of_memory(text_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(text_model, tmp_path, auto())

    def fail(*_: Any) -> None:
        raise RuntimeError("the model is broken")

    trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^the model is broken$"):
        trainer.train()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"headroom": 1.0}, "headroom must be a share of at least 0 and below 1, got 1.0."),
        ({"headroom": True}, "headroom must be a share of at least 0 and below 1, got True."),
        ({"limit": 0}, r"memory_limit must be a positive integer \(bytes\), got 0."),
        ({"limit": "8 GB"}, r"memory_limit must be a positive integer \(bytes\), got '8 GB'."),
    ],
)
def test_bad_values(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        auto(**given)


# -- several ranks


def _ddp(
    rank: int, world: int, model: Path, output: Path, port: int, how: list[Any], budget: int, above: int
) -> Outcome:
    launch_like_torchrun(rank, world, port)
    more = {"dtype": torch.float64, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    given = None if how[rank] is None else auto(how[rank])
    trainer = make_trainer(model, output, given, budget=budget, **more)
    trainer.model.config.attention_dropout = 0.0
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # the reference draws other numbers
    trainer.args.learning_rate = 0.0
    if above and rank == 1:
        trainer.model.register_forward_pre_hook(Hungry(above), with_kwargs=True)
    with KeepDouble():
        return run(trainer)


def _world(model: Path, output: Path, how: list[Any], budget: int = 120, above: int = 0) -> list[Outcome]:
    return run_ranks(2, _ddp, model, output, free_port(), how, budget, above, init_group=False, deadline=90)


def _decisions(outcome: Outcome) -> tuple[Probe, ...]:
    assert outcome.report is not None
    return outcome.report.probes


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_with_different_memory_agree_on_the_least(text_model: Path, tmp_path: Path) -> None:
    uneven = _world(text_model, tmp_path / "uneven", [100 * MB, 56 * MB])
    even = _world(text_model, tmp_path / "even", [56 * MB, 56 * MB])
    assert uneven[0].budget == uneven[1].budget == even[0].budget == even[1].budget
    assert LONGEST < uneven[0].budget < DEPTH * LONGEST
    assert _decisions(uneven[0]) == _decisions(uneven[1]), "the ranks went different ways"
    assert uneven[0].report.capacity == 56 * MB

    updates = [list(chain(*steps)) for steps in _audit_updates(tmp_path / "uneven", 2)]
    _check_gradients(text_model, [(o.gradients, o.losses, o.summary) for o in uneven], updates)
    given = _world(text_model, tmp_path / "given", [None, None], budget=uneven[0].budget)
    for one, other in zip(uneven, given, strict=True):
        assert_same_run(one, other)


@pytest.mark.slow
@pytest.mark.distributed
def test_one_rank_out_of_memory_decides_for_all(text_model: Path, tmp_path: Path) -> None:
    outcomes = _world(text_model, tmp_path, [2000 * MB, 2000 * MB], above=400)
    assert [outcome.budget for outcome in outcomes] == [384, 384]
    assert outcomes[0].summary["unique"] == SIZE


def _zero(
    rank: int, world: int, model: Path, output: Path, port: int, stage: int, limit: int | None, budget: int, above: int
) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    launch_like_torchrun(rank, world, port)
    del os.environ["ACCELERATE_USE_CPU"]  # with it accelerate ignores `deepspeed` and runs DDP
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    config = zero_config(stage, 2)
    config["zero_optimization"]["reduce_bucket_size"] = 2**18  # elements; by default more than all this model needs
    given = None if limit is None else auto(limit)
    more = {"deepspeed": config, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    more["per_device_train_batch_size"] = 1
    trainer = make_trainer(model, output, given, budget=budget, **more)
    if above and rank == 1:
        trainer.model.register_forward_pre_hook(Hungry(above), with_kwargs=True)
    trainer.train()
    assert trainer.model_wrapped.zero_optimization_stage() == stage
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer.odb_config.token_budget, losses, weights


def _zero_world(model: Path, output: Path, stage: int, limit: int | None, budget: int = 120, above: int = 0) -> Any:
    return run_ranks(2, _zero, model, output, free_port(), stage, limit, budget, above, init_group=False, deadline=100)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_left_as_it_was(text_model: Path, tmp_path: Path, stage: int) -> None:
    found = _zero_world(text_model, tmp_path / "auto", stage, LIMIT)
    assert found[0][0] == found[1][0]
    assert LONGEST < found[0][0] < DEPTH * LONGEST
    given = _zero_world(text_model, tmp_path / "given", stage, None, found[0][0])
    for (_, losses, weights), (_, other_losses, other_weights) in zip(found, given, strict=True):
        assert losses == other_losses
        assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sharded_run_that_runs_out_ends_with_the_budget_to_set(text_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        _zero_world(text_model, tmp_path, 2, 2000 * MB, above=400)
    text = str(failure.value)
    assert "OdbError: odb_token_budget: auto: rank 1 ran out of memory in a step of 512 padded tokens" in text
    assert "set odb_token_budget: 256, which fitted, or less." in text


def test_torch_says_so_when_the_cpu_runs_out() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not isinstance(error.value, OdbError)
