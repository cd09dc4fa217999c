"""What `train` trains: first exchanges of real conversations, a part of Qwen's tokenizer, a small random model."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.qwen_tokenizer import make_qwen_tokenizer
from benchmarks.sharegpt import DATASET, read_conversations, write_dataset
from benchmarks.train.record import digest

TEMPLATE = "qwen3_nothink"
EXCHANGE = 2
"""Turns of a conversation that are taken: the first question and its answer."""

STOCK = ("standard", "sorted", "packing", "odb")
"""Methods that run through `llamafactory-cli train`."""
DRIVEN = ("gmt", "bmt", "public")
"""Methods that `benchmarks.train.driver` brings into LLaMA-Factory's run."""
METHODS = ("standard", "sorted", "packing", "gmt", "bmt", "public", "odb")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained."""

    conversations: int
    held_out: int
    """Conversations behind those, for the loss after training."""
    cutoff: int
    """cutoff_len (tokens)."""
    batch_size: int
    """Samples of a rank's micro-batch of Standard and Sorted, rows of packing; the budget is x cutoff."""
    vocabulary: int
    """First so many tokens of Qwen's tokenizer."""
    hidden: int
    layers: int
    depth: int = 256
    """D; the default of `odb_depth`."""
    ranks: int = 2
    workers: int = 1
    learning_rate: float = 2e-3

    @property
    def budget(self) -> int:
        """Padded tokens of a micro-batch, at most."""
        return self.batch_size * self.cutoff


FULL = Size(conversations=640, held_out=96, cutoff=1024, batch_size=2, vocabulary=8192, hidden=128, layers=2)
QUICK = Size(conversations=64, held_out=8, cutoff=512, batch_size=2, vocabulary=1024, hidden=32, layers=1)


@dataclass(frozen=True)
class Encoded:
    """Conversations after template and truncation, by LLaMA-Factory's own preprocessing."""

    input_ids: list[list[int]]
    labels: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.input_ids]

    @property
    def loss_tokens(self) -> list[int]:
        return [sum(label != -100 for label in labels[1:]) for labels in self.labels]

    @property
    def digests(self) -> list[str]:
        return [digest(ids) for ids in self.input_ids]


@dataclass(frozen=True)
class Place:
    """Where everything of an invocation lies."""

    root: Path

    @property
    def marker(self) -> Path:
        """Says that the directory is this benchmark's, so that what an earlier run made there may be replaced."""
        return self.root / ".train"

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


@dataclass(frozen=True)
class Prepared:
    """The data as every method sees them, and the model before training."""

    train: Encoded
    packed: Encoded
    """As packing sees them: LLaMA-Factory lowers the cutoff by one for it."""
    held_out: Encoded


def prepare(place: Place, size: Size, seed: int) -> Prepared:
    """Make tokenizer, data and model in an empty place, or in one of an earlier invocation.

    Raises:
        BenchmarkError: the place holds other things, or a package is missing.
    """
    if place.root.exists() and any(place.root.iterdir()) and not place.marker.exists():
        raise BenchmarkError(f"{place.root} is not empty and was not made by this benchmark; name another --work-dir.")
    shutil.rmtree(place.root, ignore_errors=True)
    place.root.mkdir(parents=True)
    place.marker.touch()
    chosen = [turns[:EXCHANGE] for turns in read_conversations(size.conversations + size.held_out)]
    train, held_out = chosen[: size.conversations], chosen[size.conversations :]
    write_dataset(train, place.data)
    make_model(place.model, make_qwen_tokenizer(size.vocabulary), size, seed)
    return Prepared(
        train=encode(place.model, train, size.cutoff),
        packed=encode(place.model, train, size.cutoff - 1),
        held_out=encode(place.model, held_out, size.cutoff),
    )


def make_model(path: Path, tokenizer: Any, size: Size, seed: int) -> None:
    """Write a random Qwen3 and its tokenizer."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    heads = max(1, size.hidden // 64)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=size.hidden // heads,
        max_position_embeddings=2 * size.cutoff,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def recipe(place: Place, method: str, size: Size, seed: int) -> dict[str, Any]:
    """The recipe of a method; they differ in nothing but the batching."""
    values: dict[str, Any] = {
        "model_name_or_path": str(place.model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(place.data),
        "dataset": DATASET,
        "template": TEMPLATE,
        "cutoff_len": size.cutoff,
        "overwrite_cache": True,
        "dataloader_num_workers": size.workers,
        "per_device_train_batch_size": size.batch_size,
        "gradient_accumulation_steps": 1,
        "learning_rate": size.learning_rate,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 1,
        "seed": seed,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "include_num_input_tokens_seen": "all",  # counts padded tokens over all ranks
        "output_dir": str(place.output(method)),
        "overwrite_output_dir": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    own: dict[str, dict[str, Any]] = {
        "sorted": {"train_sampling_strategy": "group_by_length"},
        "packing": {"packing": True},
        "public": {"per_device_train_batch_size": 1, "dataloader_prefetch_factor": size.depth // size.workers},
        "odb": {"odb": True, "odb_audit": True},
    }
    driven = {"benchmark_budget": size.budget, "benchmark_depth": size.depth} if method in DRIVEN else {}
    return values | own.get(method, {}) | driven


def encode(model: Path, conversations: list[list[dict[str, str]]], cutoff: int) -> Encoded:
    """By LLaMA-Factory's own preprocessing, with the tokenizer as it is loaded from `model`."""
    from llamafactory.data.processor import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    data_args = DataArguments(template=TEMPLATE, cutoff_len=cutoff)
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
    return Encoded(encoded["input_ids"], encoded["labels"])


def statistics_of(lengths: list[int], cutoff: int) -> dict[str, float]:
    """Mean, variation and extremes of lengths (tokens)."""
    mean = statistics.fmean(lengths)
    return {
        "samples": len(lengths),
        "mean": round(mean, 1),
        "cv": round(statistics.pstdev(lengths) / mean, 3),
        "min": min(lengths),
        "median": statistics.median(lengths),
        "max": max(lengths),
        "share_at_cutoff": round(sum(length >= cutoff for length in lengths) / len(lengths), 3),
    }


def write_recipe(place: Place, method: str, size: Size, seed: int) -> None:
    text = json.dumps(recipe(place, method, size, seed), indent=2) + "\n"  # JSON is YAML
    place.recipe(method).write_text(text, encoding="utf-8")
