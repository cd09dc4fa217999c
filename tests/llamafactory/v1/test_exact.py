"""The loss and the gradient of an update are those of its mean loss per target, as one process computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.v1.helpers import SIZE, check_exactly_once, data_of, train_v1

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def reference(model: Any, samples: list[dict[str, Any]]) -> tuple[float, float]:
    """(loss, norm of the gradient) of the mean loss per target, one sample at a time without padding."""
    model.zero_grad()
    targets = sum(sum(label != -100 for label in sample["labels"][1:]) for sample in samples)
    total = 0.0
    for sample in samples:
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
        logits = model(input_ids=ids).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return total, float(norm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_equal_the_reference(demo: DemoPaths, text_model: Path, tmp_path: Path, ranks: int) -> None:
    """With a learning rate of 0 the weights stay, so each logged update can be computed again from the audit."""
    from llamafactory.v1.core.data_engine import DataEngine
    from llamafactory.v1.core.utils.rendering import Renderer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = json.loads((demo.data / "odb_demo_text.json").read_text(encoding="utf-8"))[:SIZE]
    data = data_of(tmp_path / "data", rows)
    recipe = {
        "model": str(text_model),
        "train_dataset": data,
        "template": "qwen3_nothink",
        "output_dir": str(tmp_path / "out"),
        "batching_strategy": "odb",
        "odb_token_budget": 768,
        "odb_depth": 8,
        "odb_audit": True,
        "cutoff_len": 256,
        "micro_batch_size": 1,
        "global_batch_size": 3 * ranks,
        "batching_workers": 1,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "bf16": False,
        "enable_activation_checkpointing": False,
    }
    run = train_v1(recipe, ranks=ranks)
    of_ranks = check_exactly_once(run, ranks=ranks, epochs=1)
    lines = [line for rank in of_ranks for line in rank]
    assert any(line["idle"] for line in lines), "no filler was part of it"
    renderer = Renderer("qwen3_nothink", AutoTokenizer.from_pretrained(text_model))
    rendered = renderer.process_samples([DataEngine(data)[i] for i in range(SIZE)])
    cut = [{key: sample[key][:256] for key in ("input_ids", "labels")} for sample in rendered]
    model = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    log = run.lines("trainer_log.jsonl")
    assert len(log) >= 3
    for entry in log:
        indices = [i for line in lines if line["update"] == entry["step"] for i in line["indices"]]
        loss, norm = reference(model, [cut[i] for i in indices])
        assert entry["loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(norm, rel=1e-4)
