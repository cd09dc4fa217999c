"""What is learnt: two small tasks of uneven length, a vocabulary of whole words, a model that learns them on a CPU.

`count up from 12 by 7` is short and has a long answer; `largest of 17 4 99 ...` is long and has a short one. So samples
differ in input tokens and in loss tokens, each in its own way, as real ones do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATASET = "quality"
TEMPLATE = "qwen3_nothink"
CUTOFF = 80
"""Tokens. No sample is longer, so none is cut off (and packing drops none)."""

NUMBERS = 128
"""Numbers are 0 to this, each a token."""
STEPS = range(2, 10)
LONGEST_LIST = 60
WORDS = ("count", "up", "down", "from", "by", "largest", "of", "user", "assistant", "system")

TASKS = ("count", "largest")


@dataclass(frozen=True, slots=True)
class Sample:
    """A question and its only right answer, words with blanks between them."""

    task: str
    question: str
    answer: str


def make_samples(train: int, held_out: int, seed: int) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """(samples to train on, held-out ones, as many others to choose a learning rate by), half of each task.

    No question is in two of them; those to train on come in random order.

    Raises:
        ValueError: there are not so many different questions of a task.
    """
    rng = random.Random(f"quality/{seed}")
    counts = [_count(way, first, step) for way in ("up", "down") for first in range(NUMBERS) for step in STEPS]
    needed = (train + 2 * held_out) // 2
    if needed > len(counts):
        most = 2 * len(counts)
        raise ValueError(
            f"there are only {len(counts)} questions to count; ask for {most} at most, held-out ones twice."
        )
    rng.shuffle(counts)
    lists: dict[str, Sample] = {}
    while len(lists) < needed:
        sample = _largest(rng)
        lists[sample.question] = sample
    largest = list(lists.values())
    bounds = (0, train // 2, (train + held_out) // 2, needed)
    kept, held, tuning = ([*counts[start:end], *largest[start:end]] for start, end in itertools.pairwise(bounds))
    rng.shuffle(kept)
    return kept, held, tuning


def _count(way: str, first: int, step: int) -> Sample:
    numbers = range(first, NUMBERS, step) if way == "up" else range(first, -1, -step)
    return Sample("count", f"count {way} from {first} by {step}", " ".join(map(str, numbers)))


def _largest(rng: random.Random) -> Sample:
    numbers = [rng.randrange(NUMBERS) for _ in range(rng.randint(2, LONGEST_LIST))]
    return Sample("largest", f"largest of {' '.join(map(str, numbers))}", str(max(numbers)))


def write_dataset(samples: Sequence[Sample], directory: Path) -> None:
    """The samples in LLaMA-Factory's sharegpt format, with their `dataset_info.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"conversations": [{"from": "human", "value": one.question}, {"from": "gpt", "value": one.answer}]}
        for one in samples
    ]
    (directory / f"{DATASET}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    entry = {
        "file_name": f"{DATASET}.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations"},
    }
    (directory / "dataset_info.json").write_text(json.dumps({DATASET: entry}, indent=2) + "\n", encoding="utf-8")


def prompt_text(sample: Sample) -> str:
    """What the model reads before it answers, as LLaMA-Factory's template makes it."""
    return f"<|im_start|>user\n{sample.question}<|im_end|>\n<|im_start|>assistant\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each number and word, and Qwen's control tokens; blanks and line ends are no tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from odb_factory.tools.demo.tokenizer import as_pretrained

    words = [*map(str, range(NUMBERS)), *WORDS]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return as_pretrained(core)


def make_model(path: Path, *, seed: int, layers: int, hidden: int) -> None:
    """Write a random Qwen3 and the tokenizer to `path`."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    tokenizer = make_tokenizer()
    ids: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=2 * CUTOFF,
        tie_word_embeddings=False,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
