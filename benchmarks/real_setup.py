"""What `benchmarks.real_input` trains: real conversations, Qwen's tokenizer, a tiny random model, two recipes."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.qwen_tokenizer import MODEL_VOCABULARY, check_against_tiktoken, check_ids, make_qwen_tokenizer
from benchmarks.sharegpt import DATASET, read_conversations, write_dataset

METHODS = ("standard", "odb")
CUTOFF = 2048
TEMPLATE = "qwen3_nothink"
SEED = 42


@dataclass(frozen=True)
class Lengths:
    """Tokens of each conversation after template and truncation, by LLaMA-Factory's own preprocessing."""

    tokens: list[int]
    loss_tokens: list[int]

    def statistics(self) -> dict[str, float]:
        mean = statistics.fmean(self.tokens)
        shares = [loss / length for loss, length in zip(self.loss_tokens, self.tokens, strict=True)]
        return {
            "conversations": len(self.tokens),
            "tokens": sum(self.tokens),
            "mean": round(mean, 1),
            "cv": round(statistics.pstdev(self.tokens) / mean, 3),
            "min": min(self.tokens),
            "median": statistics.median(self.tokens),
            "max": max(self.tokens),
            "share_at_cutoff": round(sum(length >= CUTOFF for length in self.tokens) / len(self.tokens), 3),
            "loss_token_share": round(statistics.fmean(shares), 3),
        }


@dataclass(frozen=True)
class Place:
    """Where everything of an invocation lies."""

    root: Path

    @property
    def marker(self) -> Path:
        """Says that the directory is this benchmark's, so that what an earlier run made there may be replaced."""
        return self.root / ".real_input"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def output(self, method: str) -> Path:
        return self.root / f"out_{method}"

    def cache(self, method: str) -> Path:
        return self.root / f"hf_home_{method}"

    def recipe(self, method: str) -> Path:
        return self.root / f"{method}.yaml"

    def console(self, method: str) -> Path:
        return self.root / f"{method}.log"


def prepare(place: Place, conversations: int, batch_size: int) -> Lengths:
    """Make tokenizer, data, model and both recipes; returns the lengths."""
    if place.root.exists() and any(place.root.iterdir()) and not place.marker.exists():
        raise BenchmarkError(f"{place.root} is not empty and was not made by this benchmark; name another --work-dir.")
    place.root.mkdir(parents=True, exist_ok=True)
    place.marker.touch()
    for made in (place.model, place.data, *map(place.output, METHODS), *map(place.cache, METHODS)):
        shutil.rmtree(made, ignore_errors=True)
    print("Reading conversations ...", flush=True)
    chosen = read_conversations(conversations)
    write_dataset(chosen, place.data)
    print("Making the Qwen tokenizer (some seconds) ...", flush=True)
    tokenizer = make_qwen_tokenizer()
    compared = check_against_tiktoken(tokenizer, [turn["value"] for turns in chosen for turn in turns])
    print(f"  {len(tokenizer):,} tokens; {compared:,} ids equal tiktoken's", flush=True)
    make_model(place.model, tokenizer)
    for method in METHODS:
        text = json.dumps(recipe(place, method, batch_size), indent=2) + "\n"  # JSON is YAML
        place.recipe(method).write_text(text, encoding="utf-8")
    return measure_lengths(place.model, chosen)


def make_model(path: Path, tokenizer: Any) -> None:
    """Write a random one-layer Qwen3 with Qwen's vocabulary."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=MODEL_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2 * CUTOFF,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def recipe(place: Place, method: str, batch_size: int) -> dict[str, Any]:
    """The recipe of a method; the two differ in nothing but the batching."""
    common: dict[str, Any] = {
        "model_name_or_path": str(place.model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(place.data),
        "dataset": DATASET,
        "template": TEMPLATE,
        "cutoff_len": CUTOFF,
        "overwrite_cache": True,
        "dataloader_num_workers": 1,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5.0e-3,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 1,
        "seed": SEED,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "include_num_input_tokens_seen": "all",  # counts padded tokens over all ranks
        "output_dir": str(place.output(method)),
        "overwrite_output_dir": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    if method == "odb":
        common.update(odb=True, odb_token_budget=batch_size * CUTOFF, odb_audit=True)
    return common


def measure_lengths(model: Path, conversations: list[list[dict[str, str]]]) -> Lengths:
    """Lengths by LLaMA-Factory's own preprocessing, with the tokenizer as it is loaded from `model`."""
    from llamafactory.data.processor import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    check_ids(tokenizer)
    data_args = DataArguments(template=TEMPLATE, cutoff_len=CUTOFF)
    encoder = SupervisedDatasetProcessor(
        template=get_template_and_fix_tokenizer(tokenizer, data_args),
        tokenizer=tokenizer,
        processor=None,
        data_args=data_args,
    )
    roles = {"human": "user", "gpt": "assistant"}
    messages = [[{"role": roles[t["from"]], "content": t["value"]} for t in turns] for turns in conversations]
    nothing: list[Any] = [None] * len(messages)
    empty: list[Any] = [[]] * len(messages)
    encoded = encoder.preprocess_dataset(
        {
            "_prompt": [turns[:-1] for turns in messages],
            "_response": [turns[-1:] for turns in messages],
            **dict.fromkeys(("_system", "_tools"), nothing),
            **dict.fromkeys(("_images", "_videos", "_audios"), empty),
        }
    )
    loss_tokens = [sum(label != -100 for label in labels[1:]) for labels in encoded["labels"]]
    return Lengths([len(ids) for ids in encoded["input_ids"]], loss_tokens)
