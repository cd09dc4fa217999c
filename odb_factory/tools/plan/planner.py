"""Makes a plan: observe, predict each batching method, recommend."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.option import AUTO
from odb_factory.runtime.memory import default_window_bytes
from odb_factory.tools.plan.advice import Advice, advise
from odb_factory.tools.plan.compare import Comparison, Fixed
from odb_factory.tools.plan.findings import find_stops, make_warnings
from odb_factory.tools.plan.memory import Memory, measure_memory
from odb_factory.tools.plan.observed import Lengths, Observed, describe_lengths
from odb_factory.tools.plan.pipeline import Pipeline, observe, open_pipeline
from odb_factory.tools.plan.prediction import Prediction
from odb_factory.tools.plan.recipe import Recipe

DEFAULT_SAMPLES = 2000

RANKS_PER_HOST = 8
"""Assumed if the environment does not say how many ranks share a host."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All results of the planning."""

    recipe: Recipe
    observed: Observed
    config: OdbConfig
    """The configuration of the recipe's own run."""
    budget_name: str
    """Where its budget comes from."""
    fixed: Fixed
    lengths: Lengths
    world_size: int
    standard: Prediction
    sorted: Prediction
    packing: Prediction | None
    """None: not for samples with media."""
    budgets: tuple[Prediction, ...]
    """ODB at the recipe's depth and several budgets, smallest first."""
    depths: tuple[Prediction, ...]
    """ODB at the recipe's budget and several depths, smallest first."""
    own: Prediction
    """ODB at the recipe's budget and depth, which is in `budgets` and in `depths`."""
    memory: Memory
    advice: Advice
    warnings: tuple[str, ...]
    """Sentences about what a run would leave out, or do differently than expected."""
    stops: tuple[str, ...]
    """Sentences about why a run would fail; empty if nothing was found."""


def ranks_of_environment() -> int:
    """Number of ranks of a run started here: as the variables of torchrun or LLaMA-Factory say, else 1."""
    return _number("WORLD_SIZE", 0) or max(1, _number("NPROC_PER_NODE", 1) * _number("NNODES", 1))


def ranks_per_host(world_size: int) -> int:
    """Number of ranks that share a host's memory."""
    known = _number("LOCAL_WORLD_SIZE", 0) or _number("NPROC_PER_NODE", 0) or RANKS_PER_HOST
    return min(world_size, known)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def make_plan(
    recipe: Recipe,
    *,
    samples: int | None = DEFAULT_SAMPLES,
    world_size: int,
    seed: int | None = None,
) -> Plan:
    """Plan a recipe.

    Args:
        samples: number of rows to run through the pipeline, chosen at random; None: all.
        world_size: ranks to plan for.
        seed: for choosing rows and for the epoch's order; None: the recipe's own.

    Raises:
        RunWouldFail: no row is usable, or every sample is longer than the budget and `odb_overlong` is `drop`.
        RecipeError: something that the recipe names does not exist or cannot be used.
    """
    pipeline = open_pipeline(recipe)
    config = _config_here(pipeline, world_size, seed)
    observed = observe(pipeline, samples, config.seed)
    stops = find_stops(recipe, pipeline, config, observed, world_size)
    return _compare(recipe, pipeline, config, observed, world_size, stops)


def _compare(
    recipe: Recipe, pipeline: Pipeline, config: OdbConfig, observed: Observed, world_size: int, stops: tuple[str, ...]
) -> Plan:
    """The plan for the observed samples."""
    fixed, name = _fixed(recipe), _budget_name(pipeline, recipe)
    comparison = Comparison(
        observed,
        config,
        fixed,
        world_size=world_size,
        packable=not any(meta.has_media for meta in observed.metas),
        samples_per_update=recipe.finetuning_args.odb_samples_per_update,
    )
    overlong = [make_budget(config).overlong(meta) for meta in observed.metas]
    facts: dict[str, Any] = {
        "lengths": describe_lengths(observed.metas, cutoff=fixed.cutoff, overlong=overlong),
        "memory": measure_memory(
            observed.metas,
            samples=-(-len(pipeline.dataset) // world_size),
            ranks_per_host=ranks_per_host(world_size),
            bound=config.window_bytes,
            bound_is_given=pipeline.config.window_bytes is not None,
        ),
    }
    own = comparison.online(config.token_budget, config.depth)
    stock = comparison.standard(), comparison.sorted()
    advice = advise(comparison, own, *stock, observed=observed, budget_name=name, **facts)
    return Plan(
        recipe=recipe,
        observed=observed,
        config=config,
        budget_name=name,
        fixed=fixed,
        world_size=world_size,
        standard=stock[0],
        sorted=stock[1],
        packing=comparison.packing(),
        budgets=comparison.budgets(),
        depths=comparison.depths(),
        own=own,
        advice=advice,
        warnings=(*_auto(pipeline), *make_warnings(config, observed, facts["lengths"], own, advice)),
        stops=stops,
        **facts,
    )


def _config_here(pipeline: Pipeline, world_size: int, seed: int | None) -> OdbConfig:
    """The run's configuration, with the given seed and this host's byte limit for windows."""
    given = pipeline.config.window_bytes
    return dataclasses.replace(
        pipeline.config,
        window_bytes=default_window_bytes(ranks_per_host(world_size)) if given is None else given,
        seed=pipeline.config.seed if seed is None else seed,
    )


def _fixed(recipe: Recipe) -> Fixed:
    return Fixed(
        batch_size=recipe.training_args.per_device_train_batch_size,
        accumulation=recipe.training_args.gradient_accumulation_steps,
        cutoff=recipe.data_args.cutoff_len,
        rows_at_once=recipe.data_args.preprocessing_batch_size,
    )


def _budget_name(pipeline: Pipeline, recipe: Recipe) -> str:
    size, cutoff = recipe.training_args.per_device_train_batch_size, recipe.data_args.cutoff_len
    worst = f"{size} x {cutoff}, the worst case that the fixed batches fit"
    if pipeline.budget_is == AUTO:
        return f"auto finds it before the training; planned with {worst}"
    return "the recipe's own" if pipeline.budget_is == "given" else worst


def _auto(pipeline: Pipeline) -> tuple[str, ...]:
    if pipeline.budget_is != AUTO:
        return ()
    budget = f"{pipeline.config.token_budget:,}"
    return (f"odb_token_budget is auto: the run finds its budget before it trains; {budget} stands for it here.",)
