"""One evaluation for all methods: loss per answer token and exact answers on held-out questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.task import TASKS, Sample, prompt_text

BATCH = 100
"""Questions that are answered together. They are of like length, since they come sorted."""


@dataclass(frozen=True)
class Score:
    """Of one model on the held-out questions."""

    loss: float
    """Mean over all answer tokens, the end of the answer among them."""
    exact: dict[str, float]
    """Task -> share of questions whose greedy answer is right from its first token to its end."""

    @property
    def exact_match(self) -> float:
        """Mean over the tasks."""
        return sum(self.exact.values()) / len(self.exact)


def evaluate(path: Path, samples: Sequence[Sample]) -> Score:
    """Score of the model that a training saved to `path`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loss_sum = tokens = 0.0
    right: dict[str, list[bool]] = {task: [] for task in TASKS}
    with torch.no_grad():
        for chosen in _batches(samples):
            prompts = [tokenizer.encode(prompt_text(one), add_special_tokens=False) for one in chosen]
            answers = [
                [*tokenizer.encode(one.answer, add_special_tokens=False), tokenizer.eos_token_id] for one in chosen
            ]
            loss, count = answer_loss(model, prompts, answers)
            loss_sum, tokens = loss_sum + loss, tokens + count
            given = greedy(model, prompts, max(map(len, answers)), tokenizer.eos_token_id, tokenizer.pad_token_id)
            for one, answer, found in zip(chosen, answers, given, strict=True):
                right[one.task].append(found[: len(answer)] == answer)
    return Score(loss_sum / tokens, {task: sum(each) / len(each) for task, each in right.items() if each})


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    by_length = sorted(samples, key=lambda one: (len(one.answer.split()), len(one.question.split())))
    for start in range(0, len(by_length), BATCH):
        yield by_length[start : start + BATCH]


def answer_loss(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> tuple[float, int]:
    """(sum of the cross entropy over all answer tokens, their number)"""
    import torch

    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor(prompt + answer)
        ids[row, : len(whole)] = whole
        mask[row, : len(whole)] = 1
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss.item(), int((labels[:, 1:] != -100).sum())


def greedy(model: Any, prompts: list[list[int]], length: int, end: int, pad: int) -> list[list[int]]:
    """The most likely tokens after each prompt, `length` of them or up to and with `end`."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=length, do_sample=False, eos_token_id=end, pad_token_id=pad
    )
    return [row.tolist() for row in made[:, width:]]
