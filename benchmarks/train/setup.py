"""What `train` trains: first exchanges of real conversations, a part of Qwen's tokenizer, a small random model."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.encoding import TEMPLATE, Encoded, encode
from benchmarks.qwen_tokenizer import make_qwen_tokenizer
from benchmarks.sharegpt import DATASET, read_conversations, write_dataset
from benchmarks.work_dir import fresh

EXCHANGE = 2
"""Turns of a conversation that are taken: the first question and its answer."""

PAD_MULTIPLE = 8
"""LLaMA-Factory pads training batches to a multiple of this."""

METHODS = ("standard", "sorted", "packing", "gmt", "bmt", "public", "odb")
DRIVEN = ("gmt", "bmt", "public")
"""Those that `benchmarks.train.driver` brings into LLaMA-Factory's run; the others: `llamafactory-cli train`."""


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
    head: int = 32
    """Width of the one attention head. Narrow, so that attention takes about as much of a token's time as in a model of
    some billion parameters: a 64-wide model with a head of 64 pays for it as if its context were many times longer."""
    depth: int = 1024
    """D; the default of `odb_depth`."""
    ranks: int = 2
    workers: int = 1
    learning_rate: float = 2e-3

    @property
    def budget(self) -> int:
        """Padded tokens of a micro-batch, at most."""
        return self.batch_size * self.cutoff


FULL = Size(conversations=640, held_out=96, cutoff=2048, batch_size=2, vocabulary=4096, hidden=256, layers=2)
QUICK = Size(conversations=64, held_out=8, cutoff=512, batch_size=2, vocabulary=1024, hidden=32, layers=1)


@dataclass(frozen=True)
class Place:
    """Where everything of an invocation lies."""

    root: Path

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
    fresh(place.root)
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
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=size.head,
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
