"""v1's data engine and renderer as one data set: what it gives, and what it says of samples that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odb_factory.core.sample import BadSample
from tests.llamafactory.v1.helpers import data_of

CUTOFF = 24


def dataset(text_model: Path, path: str) -> Any:
    from llamafactory.v1.core.data_engine import DataEngine
    from llamafactory.v1.core.utils.rendering import Renderer
    from transformers import AutoTokenizer

    from odb_factory.llamafactory.v1.dataset import RenderedDataset

    renderer = Renderer("qwen3_nothink", AutoTokenizer.from_pretrained(text_model))
    return RenderedDataset(DataEngine(path), renderer, CUTOFF)


def turns(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.fixture
def made(text_model: Path, tmp_path: Path) -> Any:
    rows = [turns("How many?", "three"), turns("Which one is longer than the others? " * 9, "this one " * 9)]
    return dataset(text_model, data_of(tmp_path / "data", [*rows, {"conversations": []}]))


def test_a_batch_is_that_of_stock(made: Any) -> None:
    """Cut here or there: v1's own functions make the same of it."""
    from llamafactory.v1.utils.helper import pad_and_truncate
    from torch.utils.data import default_collate

    from odb_factory.llamafactory.v1.dataset import Collate

    ours = Collate(CUTOFF)([made[0], made[1]])
    whole = made._renderer.process_samples([made._engine[0], made._engine[1]])
    stock = default_collate(pad_and_truncate(whole, CUTOFF))
    assert len(made[1]["input_ids"]) == CUTOFF < len(whole[1]["input_ids"])
    assert set(ours) == set(stock) - {"_dataset_name"}
    for name, tensor in ours.items():
        assert tensor.dtype == stock[name].dtype
        assert (tensor == stock[name]).all()


def test_a_filler_has_no_weight(made: Any) -> None:
    from odb_factory.llamafactory.v1.dataset import Collate
    from odb_factory.llamafactory.v1.strategy import without_weight

    batch = Collate(CUTOFF)([made[0]])
    filler = without_weight(batch)
    assert (filler["labels"] == -100).all()
    assert (filler["loss_weights"] == 0).all()
    assert (batch["labels"] != -100).any(), "the batch itself is untouched"
    assert filler["input_ids"] is batch["input_ids"]


def test_v1_weighs_batches_by_what_their_loss_is_a_mean_over(text_model: Path, tmp_path: Path) -> None:
    """Nothing predicts a sample's first token, so it must not count where it is trained on."""
    from llamafactory.v1.core.utils.rendering import Renderer
    from llamafactory.v1.utils.helper import compute_valid_tokens
    from transformers import AutoTokenizer

    from odb_factory.llamafactory.v1.dataset import Collate, RenderedDataset
    from odb_factory.runtime.observe import observe_sample

    engine = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": question}], "loss_weight": weight},
                {"role": "assistant", "content": [{"type": "text", "value": "three"}], "loss_weight": 1.0},
            ]
        }
        for question, weight in (("How many?", 1.0), ("How many of them?", 0.0), ("Why?", 1.0))
    ]
    renderer = Renderer("qwen3_nothink", AutoTokenizer.from_pretrained(text_model))
    samples = RenderedDataset(engine, renderer, CUTOFF)
    assert renderer.process_samples(engine[:1])[0]["labels"][0] != -100, "the first token is trained on"
    for indices in ([0, 1], [0, 2], [1]):
        batch = Collate(CUTOFF)([samples[i] for i in indices])
        averaged = int(batch["loss_weights"][:, 1:].sum())  # see v1's SFTTrainer.compute_loss
        assert compute_valid_tokens([batch]) == averaged
        assert sum(observe_sample(i, samples[i]).loss_tokens for i in indices) == averaged


def test_samples_are_named(made: Any) -> None:
    assert made.describe_sample(1).startswith("row 1 of the data set 'texts', {\"conversations\":")
    with pytest.raises(BadSample, match="template error"):
        made[2]


def test_the_fingerprint_follows_content_and_order(text_model: Path, tmp_path: Path, made: Any) -> None:
    rows = json.loads((tmp_path / "data" / "rows.json").read_text(encoding="utf-8"))
    same, other = (dataset(text_model, data_of(tmp_path / name, r)) for name, r in (("a", rows), ("b", rows[::-1])))
    assert made.fingerprint() == same.fingerprint() != other.fingerprint()


def test_media_are_refused_with_the_way_out(text_model: Path, tmp_path: Path) -> None:
    content = [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "What is it?"}]
    answer = [{"type": "text", "value": "a chart"}]
    rows = [{"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "data.yaml").write_text(f"pictures:\n  path: {tmp_path / 'rows.jsonl'}\n  source: local\n")
    with pytest.raises(BadSample, match="it has image_url, of which this version of LLaMA-Factory's v1 makes no batch"):
        dataset(text_model, str(tmp_path / "data.yaml"))[0]
