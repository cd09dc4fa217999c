"""Conversations as a model gets them: LLaMA-Factory's own template, tokenization, truncation and label masking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = "qwen3_nothink"


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
