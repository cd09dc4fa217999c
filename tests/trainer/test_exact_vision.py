"""Exact loss through the Trainer for Qwen3-VL, whose loss takes no item count: images, text and a filler."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Trainer, TrainingArguments

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.tools.demo.data import make_data
from odb_factory.tools.demo.model import make_vl_model
from tests.dist import run_ranks
from tests.trainer.test_exact_trainer import Collect
from tests.trainer.tiny import KeepDouble, free_port, launch_like_torchrun, relative_error

SIZE = 14
ACCUMULATION = 2


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    make_vl_model(root / "model")
    make_data(root / "data", 16, seed=0)
    return root


def _parts(demo: Path) -> tuple[Any, Any, Any]:
    """Model in float64, online data set and collate function, from LLaMA-Factory's own template and collator."""
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.template import TEMPLATES

    from odb_factory.llamafactory.collator import OdbCollator
    from odb_factory.llamafactory.online_dataset import OnlineDataset

    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    processor = AutoProcessor.from_pretrained(demo / "model")
    model = AutoModelForImageTextToText.from_pretrained(
        demo / "model", dtype=torch.float64, attn_implementation="eager"
    )
    template = TEMPLATES["qwen3_vl_nothink"]
    rows = json.loads((demo / "data" / "odb_demo.json").read_text())[:SIZE]
    roles = {"human": "user", "gpt": "assistant"}
    aligned = [
        {
            "_prompt": [{"role": roles[t["from"]], "content": t["value"]} for t in row["conversations"][:-1]],
            "_response": [{"role": "assistant", "content": row["conversations"][-1]["value"]}],
            "_system": "",
            "_tools": "",
            "_images": [str(demo / "data" / name) for name in row.get("images") or []] or None,
            "_videos": None,
            "_audios": None,
        }
        for row in rows
    ]
    arguments = SimpleNamespace(cutoff_len=1024, mask_history=False, train_on_prompt=False)
    data = OnlineDataset(
        Dataset.from_list(aligned),
        template=template,
        tokenizer=tokenizer,
        processor=processor,
        data_args=arguments,
        dtype=None,
    )
    stock = SFTDataCollatorWith4DAttentionMask(
        template=template, model=model, pad_to_multiple_of=8, tokenizer=tokenizer, processor=processor
    )
    return model, data, OdbCollator(stock, None)


def _run(rank: int, world_size: int, demo: Path, output: Path, port: int) -> list[dict[str, torch.Tensor]]:
    from odb_factory.llamafactory.online_dataset import observe_online

    launch_like_torchrun(rank, world_size, port)
    torch.set_num_threads(1)
    model, data, collate = _parts(demo)
    args = TrainingArguments(
        str(output),
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=0.0,
        max_grad_norm=0.0,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    trainer = OdbTrainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=collate,
        odb_config=OdbConfig(token_budget=400, depth=8, pad_to_multiple_of=8),
        odb_observe=observe_online,
        odb_audit=True,
    )
    collect = Collect()
    trainer.add_callback(collect)
    with KeepDouble():
        trainer.train()
    return collect.gradients


def _reference(demo: Path, indices: list[int]) -> dict[str, torch.Tensor]:
    model, data, collate = _parts(demo)
    model.train()
    targets = 0
    with KeepDouble():
        for index in indices:
            batch = collate([data[index]])
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum").backward()
            targets += int((labels[:, 1:] != -100).sum())
    return {n: torch.zeros_like(p) if p.grad is None else p.grad / targets for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_with_images_equal_the_reference(demo: Path, tmp_path: Path) -> None:
    results = run_ranks(2, _run, demo, tmp_path, free_port(), init_group=False, deadline=100)
    ranks = [
        [json.loads(line) for line in (tmp_path / f"odb_audit.rank{r}.jsonl").read_text().splitlines()] for r in (0, 1)
    ]
    steps = [[i for lines in ranks for i in lines[k]["indices"]] for k in range(len(ranks[0]))]
    updates = [list(chain(*steps[k : k + ACCUMULATION])) for k in range(0, len(steps), ACCUMULATION)]
    assert sorted(chain(*updates)) == list(range(SIZE))
    for gradients in results:
        assert len(gradients) == len(updates)
        for mine, indices in zip(gradients, updates, strict=True):
            reference = _reference(demo, indices)
            assert any(float(g.abs().max()) > 0 for n, g in reference.items() if "visual" in n)
            assert relative_error(mine, reference) < 1e-12
