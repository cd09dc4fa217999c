"""Steps stay aligned, and gradients exact, under DDP, FSDP2 and ZeRO 1 to 3: images here, text there, and fillers.

A tiny Qwen3-VL and LLaMA-Factory's collate path; one loop of one's own for all engines, and the Trainer with DeepSpeed.
Below the command line, because stock LLaMA-Factory cannot load a model for ZeRO-3 on a CPU. The Trainer is not tried
with FSDP: accelerate ignores `fsdp` on a CPU without a word, and runs DDP.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader, OdbTrainerMixin
from odb_factory.core.loss_scale import loss_scale
from odb_factory.runtime.messages import StepInfo
from odb_factory.tools.demo.data import make_data
from odb_factory.tools.demo.model import make_vl_model
from odb_factory.trainer.updates import zero_loss
from tests.dist import run_ranks
from tests.trainer.engines import ENGINES, LEARNING_RATE, Engine, import_deepspeed, zero_config
from tests.trainer.tiny import KeepDouble, free_port, launch_like_torchrun, relative_error

SIZE = 15
ACCUMULATION = 4
WORLD = 2
CONFIG = OdbConfig(
    token_budget=400,
    depth=8,
    pad_to_multiple_of=8,
    steps_multiple=ACCUMULATION,
    seed=1,  # both orders of text and images, and a filler beside images
    assignment="static",  # one rank runs out before the other
    timeout=60,
)
Tensors = dict[str, torch.Tensor]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@dataclass
class Run:
    """What one rank has seen in one epoch."""

    steps: list[StepInfo] = field(default_factory=list)
    vision_calls: list[int] = field(default_factory=list)
    """Forward passes of the vision tower in each step."""
    gradients: list[Tensors] = field(default_factory=list)
    """Of each update, whole and averaged over ranks."""
    changes: Tensors = field(default_factory=dict)
    """What the whole epoch did to the parameters."""
    held: float = 0.0
    """Share of what the engine splits that lies on this rank."""


def _rows(demo: Path) -> list[dict[str, Any]]:
    """The demo's conversations in LLaMA-Factory's aligned format."""
    from tests.llamafactory.helpers import row

    samples = json.loads((demo / "data" / "odb_demo.json").read_text())
    return [
        row(
            *(turn["value"] for turn in sample["conversations"]),
            images=[str(demo / "data" / name) for name in sample.get("images") or []] or None,
        )
        for sample in samples
    ]


def _parts(demo: Path, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Model, online data set and collate function, from LLaMA-Factory's own template and collator."""
    from transformers import Qwen3VLForConditionalGeneration

    from odb_factory.llamafactory.collator import OdbCollator
    from tests.llamafactory.helpers import make_parts

    parts = make_parts(demo / "model", "qwen3_vl_nothink", None)
    parts.model = Qwen3VLForConditionalGeneration.from_pretrained(demo / "model", dtype=dtype).train()
    return parts.model, parts.online(_rows(demo)), OdbCollator(parts.stock_collator(), None)


def _run(rank: int, world_size: int, demo: Path, engine_name: str) -> Run:
    """One epoch of one rank; every update's gradient is kept before its step."""
    import_deepspeed()
    from odb_factory.llamafactory.online_dataset import observe_online

    kind = ENGINES[engine_name]
    model, data, collate = _parts(demo, kind.dtype)
    run, calls = Run(), []
    model.model.visual.register_forward_hook(lambda *_: calls.append(len(run.steps)))
    with KeepDouble(), OdbDataLoader(data, collate, CONFIG, observe=observe_online) as loader:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine = kind(model, ACCUMULATION)
        run.held = engine.held() / sum(parameter.numel() for parameter in before.values())
        for update in _updates(loader):
            targets = sum(info.global_loss_tokens for _, info in update)
            for position, (batch, info) in enumerate(update):
                boundary = position == ACCUMULATION - 1
                factor = loss_scale(info.loss_tokens, targets, world_size)
                with engine.window(boundary):
                    engine.backward(_loss(engine, batch, factor), boundary)
                run.steps.append(info)
            run.gradients.append(engine.gradients())
            engine.step()
        run.changes = {name: after - before[name] for name, after in engine.parameters().items()}
    run.vision_calls = [calls.count(step) for step in range(len(run.steps))]
    return run


def _loss(engine: Engine, batch: Any, factor: float) -> torch.Tensor:
    if factor == 0.0:
        return zero_loss(engine.forward, batch)
    loss: torch.Tensor = engine.forward(**batch).loss * factor
    return loss


def _updates(loader: OdbDataLoader) -> Iterator[list[tuple[Any, StepInfo]]]:
    update = []
    for step in loader:
        update.append(step)
        if len(update) == ACCUMULATION:
            yield update
            update = []
    assert not update, "the last accumulation window was not completed"


def _reference(demo: Path, updates: list[list[int]]) -> tuple[list[Tensors], Tensors]:
    """Gradients of the mean loss per token and the change of the parameters: one process, one sample at a time."""
    model, data, collate = _parts(demo, torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = []
    for indices in updates:
        targets = 0
        for index in indices:
            with KeepDouble():
                batch = collate([data[index]])
                labels = batch.pop("labels")[:, 1:].flatten()
                logits = model(**batch).logits[:, :-1].flatten(0, 1)
                torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
            targets += int((labels != -100).sum())
        gradients.append({name: parameter.grad / targets for name, parameter in model.named_parameters()})
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LEARNING_RATE * gradients[-1][name]
    return gradients, {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    make_vl_model(root / "model")
    make_data(root / "data", SIZE, seed=0)
    return root


@pytest.fixture(scope="module")
def world(demo: Path) -> Callable[[str], list[Run]]:
    """The ranks' runs with an engine, made once for each engine."""
    return cache(lambda engine: run_ranks(WORLD, _run, demo, engine, deadline=90))


def _indices(runs: list[Run]) -> list[list[list[int]]]:
    """Samples by step and rank."""
    return [[list(run.steps[step].indices) for run in runs] for step in range(len(runs[0].steps))]


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_are_aligned(engine: str, world: Callable[[str], list[Run]], demo: Path) -> None:
    runs = world(engine)
    steps = len(runs[0].steps)
    for run in runs:
        assert len(run.steps) == steps
        assert [info.last for info in run.steps] == [False] * (steps - 1) + [True]
        assert len(run.gradients) == steps // ACCUMULATION
        assert run.vision_calls == [1] * steps, "text-only groups and fillers pass the vision tower too"
        assert run.held == pytest.approx(1.0 if engine == "DDP" else 1 / WORLD, rel=0.01)
    assert sorted(chain(*chain(*_indices(runs)))) == list(range(SIZE))

    kinds = [{_kind(group, _rows(demo)) for group in step} for step in _indices(runs)]
    assert {"text", "images"} in kinds, "no step has text alone on one rank and images on the other"
    assert any("filler" in step and len(step) > 1 for step in kinds), "no rank runs a filler beside a real group"
    assert {"filler"} in kinds, "no step of fillers alone completes an update"


def _kind(indices: list[int], rows: list[dict[str, Any]]) -> str:
    if not indices:
        return "filler"
    return "images" if any(rows[index]["_images"] for index in indices) else "text"


def test_ddp_equals_one_process(world: Callable[[str], list[Run]], demo: Path) -> None:
    runs = world("DDP")
    steps = _indices(runs)
    updates = [list(chain(*chain(*steps[k : k + ACCUMULATION]))) for k in range(0, len(steps), ACCUMULATION)]
    gradients, changes = _reference(demo, updates)
    assert all(any(float(g.abs().max()) > 0 for name, g in update.items() if "visual" in name) for update in gradients)
    for run in runs:
        for mine, reference in zip(run.gradients, gradients, strict=True):
            assert relative_error(mine, reference) < ENGINES["DDP"].tolerance
        assert relative_error(run.changes, changes) < ENGINES["DDP"].tolerance


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "DDP"])
def test_engine_equals_ddp(engine: str, world: Callable[[str], list[Run]]) -> None:
    ddp, runs = world("DDP"), world(engine)
    assert _indices(runs) == _indices(ddp)
    for run in runs:
        for mine, reference in zip(run.gradients, ddp[0].gradients, strict=True):
            assert relative_error(mine, reference) < ENGINES[engine].tolerance
        assert relative_error(run.changes, ddp[0].changes) < ENGINES[engine].tolerance


def _train(
    rank: int, world_size: int, demo: Path, output: Path, port: int, stage: int, samples_per_update: int | None = None
) -> tuple[Tensors, int]:
    """One epoch of one rank with the Trainer and DeepSpeed: parameters, and forward passes of the vision tower."""
    launch_like_torchrun(rank, world_size, port)
    del os.environ["ACCELERATE_USE_CPU"]  # with it accelerate ignores `deepspeed` and runs DDP
    deepspeed = import_deepspeed()
    from transformers import Trainer, TrainingArguments

    from odb_factory.llamafactory.online_dataset import observe_online

    accumulation = ACCUMULATION if samples_per_update is None else 1
    args = TrainingArguments(
        str(output),
        deepspeed=zero_config(stage, accumulation),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        num_train_epochs=1,
        seed=CONFIG.seed,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    # On a CPU accelerate forms the group and DeepSpeed does not know of it: ZeRO-3 would load the model for one rank.
    deepspeed.init_distributed("gloo")
    model, data, collate = _parts(demo, torch.float32)
    calls: list[None] = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(None))
    trainer = type("OdbTrainer", (OdbTrainerMixin, Trainer), {})(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=collate,
        odb_config=CONFIG,
        odb_observe=observe_online,
        odb_samples_per_update=samples_per_update,
        odb_audit=True,
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
    assert trainer.model_wrapped.zero_optimization_stage() == stage
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, len(calls)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer_with_deepspeed_equals_ddp(
    stage: int, world: Callable[[str], list[Run]], demo: Path, tmp_path: Path
) -> None:
    (ddp, _), steps = world("DDP"), _indices(world("DDP"))
    results = run_ranks(WORLD, _train, demo, tmp_path, free_port(), stage, init_group=False, deadline=90)
    lines = [(tmp_path / f"odb_audit.rank{rank}.jsonl").read_text().splitlines() for rank in range(WORLD)]
    assert [[json.loads(line)["indices"] for line in step] for step in zip(*lines, strict=True)] == steps
    before = dict(_parts(demo, torch.float64)[0].named_parameters())
    for parameters, vision_calls in results:
        assert vision_calls == len(steps)
        changes = {name: after - before[name].detach() for name, after in parameters.items()}
        assert relative_error(changes, ddp.changes) < ENGINES[f"ZeRO-{stage}"].tolerance


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_with_updates_of_steady_size_equals_one_process(stage: int, demo: Path, tmp_path: Path) -> None:
    """DeepSpeed is told at each micro-batch whether it ends an update; its own count of them plays no part."""
    results = run_ranks(WORLD, _train, demo, tmp_path, free_port(), stage, 4, init_group=False, deadline=90)
    updates: dict[int, list[list[int]]] = {}
    for rank in range(WORLD):
        for line in (tmp_path / f"odb_audit.rank{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            updates.setdefault(entry["update"], []).append(entry["indices"])
    sizes = [len(list(chain(*groups))) for groups in updates.values()]
    assert all(size >= 4 for size in sizes[:-1])
    assert len({len(groups) for groups in updates.values()}) > 1, "the number of micro-batches is dynamic"
    _, changes = _reference(demo, [list(chain(*groups)) for groups in updates.values()])
    before = dict(_parts(demo, torch.float64)[0].named_parameters())
    for parameters, _ in results:
        mine = {name: after - before[name].detach() for name, after in parameters.items()}
        assert relative_error(mine, changes) < ENGINES[f"ZeRO-{stage}"].tolerance
