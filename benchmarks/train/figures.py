"""The figures of a finished run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.encoding import Encoded
from benchmarks.epochs import Epoch, ideal_share
from benchmarks.launch import Finished
from benchmarks.rows import Value
from benchmarks.train import steps
from benchmarks.train.record import read
from benchmarks.train.setup import DRIVEN, Prepared, Size


def figures_of(
    method: str, output: Path, finished: Finished, data: Prepared, size: Size, seed: int
) -> dict[str, Value]:
    """What the run made of the data, how fast, and what the model has learned.

    Raises:
        BenchmarkError: the run's own counts contradict each other.
    """
    state = _json(output / "trainer_state.json")
    runtime = float(_json(output / "all_results.json")["train_runtime"])
    counted = int(state["num_input_tokens_seen"])
    more: dict[str, Value] = {}
    if method in DRIVEN:
        lines, ends = read(output, size.ranks)
        epoch = steps.recorded(lines, data.train)
        more["data_wait"] = statistics.fmean(end["wait_s"] for end in ends) / runtime
        if "length_cache_s" in ends[0]:
            more["length_cache_s"] = max(end["length_cache_s"] for end in ends)
    elif method == "odb":
        epoch = steps.audited(output, data.train, size, counted=counted, steps=int(state["global_step"]))
        summary = _json(output / "odb_summary.json")
        more["data_wait"] = float(summary["data_wait"])
        more["fillers"] = int(summary["fillers"])
    else:
        epoch = steps.replay(method, data, size, seed, counted)
    return {
        **speed(epoch, runtime),
        "updates": int(state["global_step"]),
        "eval_loss": held_out_loss(output, data.held_out, size.budget),
        "runtime_s": runtime,
        "first_step_s": finished.first_step_s,
        "wall_s": finished.wall_s,
        "cpu_s": finished.cpu_s,
        "peak_rss_gib": finished.peak_rss_gib,
        "others_share": finished.others_share,
        "left_behind": len(finished.left_behind),
        **more,
    }


def speed(epoch: Epoch, runtime: float) -> dict[str, Value]:
    """Counts of an epoch, and rates where it took `runtime` seconds; a repeated sample counts once in both."""
    emitted = epoch.emitted
    real = sum(epoch.lengths[index] * times for index, times in emitted.items())
    return {
        "samples_per_s": len(emitted) / runtime,
        "tokens_per_s": epoch.useful_tokens / runtime,
        "padded_tokens_per_s": epoch.padded_tokens / runtime,
        "padded_tokens": epoch.padded_tokens,
        "padding": 1 - real / epoch.padded_tokens,
        "ideal_share": ideal_share(epoch),
        "steps": len(epoch.steps),
        "fillers": epoch.fillers,
        "unique": len(emitted),
        "repeated": emitted.total() - len(emitted),
        "lost": len(epoch.lengths) - len(emitted),
    }


def held_out_loss(model: Path, data: Encoded, budget: int) -> float:
    """Mean loss per supervised token of `data`, of the model in a directory; the same batches for every model."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loss, count = 0.0, 0
    with torch.no_grad():
        for batch in _batches(data.lengths, budget):
            width = max(len(data.input_ids[index]) for index in batch)
            ids = torch.tensor([_filled(data.input_ids[index], width, 0) for index in batch])
            labels = torch.tensor([_filled(data.labels[index], width, -100) for index in batch])
            mask = torch.tensor([_filled([1] * len(data.input_ids[index]), width, 0) for index in batch])
            logits = network(input_ids=ids, attention_mask=mask).logits[:, :-1]
            targets = labels[:, 1:].flatten()
            loss += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            count += int((targets != -100).sum())
    return loss / count


def _batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """From short to long, at most `budget` padded tokens each."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batches[-1] and lengths[index] * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(index)
    return batches


def _filled(values: list[int], width: int, filler: int) -> list[int]:
    return values + [filler] * (width - len(values))


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
