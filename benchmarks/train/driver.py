"""A rank of a run whose batches LLaMA-Factory does not know: `torchrun --module benchmarks.train.driver METHOD RECIPE`.

LLaMA-Factory's own `run_exp` with its model, collator and trainer; only the training data are our online data set
(processed when asked for), and the training batches are those of `METHOD`:

- `gmt`, `bmt`: a loader over batches formed before, out of lengths that one pass over the data has observed;
- `public`: the package `online-dynamic-batching` by the function for Hugging Face's Trainer that its README names.

Each rank records what it trained on and how long it waited for data.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from llamafactory.train.tuner import run_exp

from benchmarks.train.loaders import Batching, make_batching
from benchmarks.train.record import Line, Recorder, digest
from odb_factory.llamafactory.collator import OdbCollator
from odb_factory.llamafactory.online_dataset import OnlineDataset
from odb_factory.llamafactory.seams import PREPROCESS, TRAINER, registry


class _Timed:
    """An iterator that adds to its trainer's `wait_s` how long its consumer waited (seconds)."""

    def __init__(self, iterator: Iterator[Any], trainer: DrivenTrainer) -> None:
        self._iterator = iterator
        self._trainer = trainer

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._iterator)
        finally:
            self._trainer.wait_s += time.perf_counter() - start


class DrivenTrainer(CustomSeq2SeqTrainer):
    """LLaMA-Factory's trainer with a loader of a peer; records each micro-batch and the wait for it."""

    def __init__(self, *, method: str, budget: int, depth: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.wait_s = 0.0
        self._recorder = Recorder(Path(self.args.output_dir), self.args.process_index)
        self._batching: Batching = make_batching(
            method, self, OdbCollator(arguments["data_collator"], None), budget=budget, depth=depth
        )

    def get_train_dataloader(self) -> Any:
        return self._batching.loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any) -> Any:
        return super().get_batch_samples(_Timed(epoch_iterator, self), *arguments)

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any) -> torch.Tensor:
        rows = [
            digest(ids[mask.bool()].tolist())
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        loss_tokens = int((inputs["labels"][:, 1:] != -100).sum())
        self._recorder.add(Line(rows, inputs["input_ids"].shape[1], loss_tokens))
        return super().training_step(model, inputs, *arguments)

    def train(self, *arguments: Any, **named: Any) -> Any:
        output = super().train(*arguments, **named)
        self._recorder.finish({"wait_s": self.wait_s, **self._batching.figures})
        return output


def main() -> None:
    """Train the recipe."""
    method, path = sys.argv[1:]
    recipe = json.loads(Path(path).read_text(encoding="utf-8"))
    budget, depth = recipe.pop("benchmark_budget"), recipe.pop("benchmark_depth")

    def preprocess(
        dataset: Any,
        data_args: Any,
        training_args: Any,
        stage: str,
        template: Any,
        tokenizer: Any,
        processor: Any = None,
        is_eval: bool = False,
    ) -> Any:
        """In place of LLaMA-Factory's: samples are processed when asked for."""
        if dataset is None or is_eval:
            return None
        return OnlineDataset(
            dataset, template=template, tokenizer=tokenizer, processor=processor, data_args=data_args, dtype=None
        )

    def trainer(**arguments: Any) -> DrivenTrainer:
        return DrivenTrainer(method=method, budget=budget, depth=depth, **arguments)

    with registry.replaced({PREPROCESS: preprocess, TRAINER: trainer}):
        run_exp(recipe)


if __name__ == "__main__":
    main()
