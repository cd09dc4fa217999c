"""A plan as JSON, for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odb_factory.tools.plan.observed import histogram
from odb_factory.tools.plan.planner import Plan

VERSION = 1

MODEL = (
    "time is proportional to padded tokens x (1 + row length / attention_length), or padded tokens where that is null, "
    "of each step's slowest rank; nothing was measured on an accelerator"
)


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures of a plan. Lengths in tokens, memory in bytes, shares from 0 to 1."""
    edges, counts = histogram([meta.length for meta in plan.observed.metas])
    return {
        "version": VERSION,
        "recipe": str(plan.recipe.path),
        "world_size": plan.world_size,
        "seed": plan.config.seed,
        "model": MODEL,
        "batch_size": plan.fixed.batch_size,
        "gradient_accumulation_steps": plan.fixed.accumulation,
        "cutoff_len": plan.fixed.cutoff,
        "token_budget": plan.config.token_budget,
        "token_budget_is": plan.budget_name,
        "depth": plan.config.depth,
        "attention_length": plan.config.attention_length,
        "samples": _samples(plan),
        "lengths": {**_lengths(plan), "histogram": {"edges": edges, "counts": counts}},
        "predictions": {
            "standard": plan.standard.as_json(),
            "sorted": plan.sorted.as_json(),
            "packing": None if plan.packing is None else plan.packing.as_json(),
            "odb": plan.own.as_json(),
            "odb_by_budget": [prediction.as_json() for prediction in plan.budgets],
            "odb_by_depth": [prediction.as_json() for prediction in plan.depths],
        },
        "memory": _memory(plan),
        "recommended": {
            "token_budget": plan.advice.budget,
            "token_budget_reason": plan.advice.budget_reason,
            "depth": plan.advice.depth,
            "depth_reason": plan.advice.depth_reason,
            "prediction": plan.advice.prediction.as_json(),
        },
        "gain_over_standard": round(plan.advice.gain, 4),
        "verdict": plan.advice.verdict,
        "verdict_reason": plan.advice.verdict_reason,
        **_run(plan.stops),
        "warnings": list(plan.warnings),
    }


def failure_as_json(recipe: Path, reason: str) -> dict[str, Any]:
    """What replaces a plan if a run would fail because it has no samples."""
    return {"version": VERSION, "recipe": str(recipe), **_run((reason,))}


def _run(stops: Sequence[str]) -> dict[str, Any]:
    return {"run_would_fail": bool(stops), "run_would_fail_at": list(stops)}


def _samples(plan: Plan) -> dict[str, Any]:
    observed = plan.observed
    return {
        "rows": observed.size,
        "measured": len(observed.metas) + len(observed.dropped),
        "usable": len(observed.metas),
        "error_of_mean_length": None if observed.error_of_mean is None else round(observed.error_of_mean, 6),
        "bad": len(observed.bad),
        "dropped": observed.reasons(),
        "dropped_samples": [
            {"index": d.index, "reason": d.reason, "detail": d.detail, "bad": d.bad} for d in observed.dropped[:100]
        ],
    }


def _lengths(plan: Plan) -> dict[str, Any]:
    lengths = plan.lengths
    figures = {
        "mean": lengths.mean,
        "sd": lengths.sd,
        "cv": lengths.cv,
        "min": lengths.least,
        "median": lengths.median,
        "p90": lengths.p90,
        "p99": lengths.p99,
        "max": lengths.most,
        "share_short": lengths.short,
        "share_at_cutoff": lengths.truncated,
        "share_above_cutoff": lengths.above_cutoff,
        "share_above_budget": lengths.above_budget,
        "share_with_media": lengths.with_media,
        "loss_token_share": lengths.loss_share,
        "loss_token_share_sd": lengths.loss_share_sd,
    }
    return {name: round(value, 6) for name, value in figures.items()}


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "bytes_per_sample": round(memory.mean_bytes),
        "bytes_per_sample_max": memory.most_bytes,
        "ranks_per_host": memory.ranks_per_host,
        "window_bytes_per_rank": round(memory.window(plan.config.depth)),
        "window_bytes_per_host": round(memory.host(plan.config.depth)),
        "odb_window_bytes": memory.bound,
        "odb_window_bytes_is_given": memory.bound_is_given,
    }
