"""What can be said about a run without loading the model: reasons why it would fail (*stops*), and warnings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.llamafactory.checks import check_sharded
from odb_factory.option import AUTO
from odb_factory.runtime.state import Identity, StateError, unpack
from odb_factory.tools.plan.advice import Advice
from odb_factory.tools.plan.observed import Lengths, Observed, RunWouldFail
from odb_factory.tools.plan.pipeline import Pipeline
from odb_factory.tools.plan.prediction import Prediction
from odb_factory.tools.plan.recipe import Recipe
from odb_factory.trainer.checkpoints import FIELD, checkpoints_in
from odb_factory.trainer.checks import needs_fillers
from odb_factory.trainer.resume import find_state


def find_stops(
    recipe: Recipe, pipeline: Pipeline, config: OdbConfig, observed: Observed, world_size: int
) -> tuple[str, ...]:
    """Why the recipe's own run would fail, one sentence each, in the order in which it would.

    Raises:
        RunWouldFail: none of the observed samples would be trained on.
    """
    _refuse_all_dropped(config, observed)
    return (
        *_start(recipe, config, world_size),
        *_resumption(recipe, pipeline),
        *_stopped_by_overlong(pipeline, config, observed),
        *_bad(config, observed),
    )


def _start(recipe: Recipe, config: OdbConfig, world_size: int) -> Iterator[str]:
    """Stops that depend on the number of ranks, and on fields that planning replaces."""
    applies, sentence = needs_fillers(config, world_size, config.steps_multiple)
    if applies:
        yield sentence
    sharded = SimpleNamespace(deepspeed=recipe.given.get("deepspeed"), fsdp=recipe.given.get("fsdp"))
    try:
        check_sharded(recipe.finetuning_args, sharded)
    except ValueError as error:
        yield _plain(error)


def _resumption(recipe: Recipe, pipeline: Pipeline) -> Iterator[str]:
    """The checkpoint to resume from must be complete, and from a run on the same samples."""
    output_dir = recipe.training_args.output_dir
    resume = recipe.given.get(FIELD)
    if resume is None and not recipe.overwrites:  # then LLaMA-Factory looks for a checkpoint itself
        resume = next(map(str, checkpoints_in(output_dir)), None)
        if resume is None and _is_taken(output_dir):
            yield (
                f"output_dir {output_dir} already holds a model; set overwrite_output_dir: true, or name another "
                "directory."
            )
    try:
        found = find_state(resume, output_dir)
    except (ValueError, OSError) as error:
        yield _plain(error)
        return
    if found is None:
        return
    checkpoint, state = found
    if recipe.training_args.ignore_data_skip:
        yield "ignore_data_skip would train on samples twice in an epoch of a run that is resumed; remove it."
    try:
        unpack(state["loader"], Identity.of(pipeline.dataset, pipeline.config))
    except StateError as error:
        yield f"{checkpoint} ({FIELD}): {error}"


def _is_taken(output_dir: str) -> bool:
    """Whether LLaMA-Factory refuses to write into that directory."""
    from llamafactory.extras.constants import CHECKPOINT_NAMES

    return any(os.path.isfile(os.path.join(output_dir, name)) for name in CHECKPOINT_NAMES)


def _plain(error: Exception) -> str:
    return str(error).removeprefix("odb: ")


def _refuse_all_dropped(config: OdbConfig, observed: Observed) -> None:
    budget = make_budget(config)
    if config.overlong == "drop" and all(budget.overlong(meta) for meta in observed.metas):
        costs = [budget.cost((meta,)) for meta in observed.metas]
        raise RunWouldFail(
            f"odb_overlong is drop, and each of the {len(costs)} samples is longer than the token budget "
            f"{config.token_budget}, so that there is nothing to train on: raise odb_token_budget (the shortest sample "
            f"takes {min(costs)} padded tokens, the longest {max(costs)})."
        )


def _stopped_by_overlong(pipeline: Pipeline, config: OdbConfig, observed: Observed) -> Iterator[str]:
    if config.overlong != "error" or pipeline.budget_is == AUTO:
        return
    budget = make_budget(config)
    overlong = [meta for meta in observed.metas if budget.overlong(meta)]
    if overlong:
        longest = max(overlong, key=lambda meta: budget.cost((meta,)))
        needed = budget.cost((longest,))
        yield (
            f"{len(overlong)} of {len(observed.metas)} samples are longer than the token budget {config.token_budget} "
            f"(sample {longest.index} takes {needed} padded tokens), and odb_overlong is error: raise odb_token_budget "
            f"to at least {needed}, or set odb_overlong to keep or drop."
        )


def _bad(config: OdbConfig, observed: Observed) -> Iterator[str]:
    if not observed.bad:
        return
    if config.on_bad_sample == "raise":
        yield f"{bad_samples(observed)}; fix them, or set odb_on_bad_sample: skip."
        return
    expected = len(observed.bad) * observed.size / observed.read
    if config.max_bad_samples is not None and expected > config.max_bad_samples:
        about = "" if observed.complete else f", about {expected:,.0f} are expected in an epoch"
        yield (
            f"{bad_samples(observed)}{about}, and odb_max_bad_samples allows {config.max_bad_samples}: fix the data, "
            "or raise that number."
        )


def bad_samples(observed: Observed) -> str:
    """How many samples are bad, and which is the first; there must be one."""
    first = observed.bad[0]
    return (
        f"{len(observed.bad)} of {observed.read} samples are bad, the first of them sample {first.index} "
        f"({first.reason}: {first.detail.rstrip('.')})"
    )


def make_warnings(
    config: OdbConfig, observed: Observed, lengths: Lengths, own: Prediction, advice: Advice
) -> list[str]:
    """Sentences about what the recipe's own run (`own`) would leave out, or do differently than the table suggests."""
    found = []
    if observed.bad and config.on_bad_sample == "skip":
        found.append(f"{bad_samples(observed)}; a run skips and names them.")
    invalid = len(observed.dropped) - len(observed.bad)
    if invalid:
        found.append(
            f"{invalid} of {observed.read} rows are invalid conversations; they are dropped, as in stock LLaMA-Factory."
        )
    found += _trained_or_dropped_overlong(config, observed, own)
    if not config.join:
        usable = round(len(observed.metas) / observed.read * observed.size)
        found.append(
            f"odb_join is false (odb_quota {config.quota:g}): an epoch of ODB emits {own.samples:,} of {usable:,} "
            "samples, so its steps per epoch do not compare with Standard's; speeds are per token."
        )
    taken = config.token_budget / lengths.mean
    if taken >= config.depth and advice.budget >= config.token_budget:
        found.append(
            f"The budget would take about {taken:,.0f} samples of the mean length, and the window holds "
            f"{config.depth}: raise odb_depth, or micro-batches stay below the budget."
        )
    if own.short_windows:
        found.append(
            f"window_bytes keeps windows short of odb_depth {config.depth}: raise odb_window_bytes, or lower odb_depth."
        )
    return found


def _trained_or_dropped_overlong(config: OdbConfig, observed: Observed, own: Prediction) -> list[str]:
    """Of overlong samples that do not end a run."""
    budget = make_budget(config)
    costs = [budget.cost((meta,)) for meta in observed.metas if budget.overlong(meta)]
    if not costs or config.overlong == "error":
        return []
    share = len(costs) / len(observed.metas)
    those = (
        f"{len(costs):,} of the {len(observed.metas):,} samples that were read ({share:.1%}) are longer than the token "
        f"budget {config.token_budget:,}"
    )
    remedy = f"raise odb_token_budget to {max(costs)}, the padded tokens of the longest one, or lower cutoff_len"
    if config.overlong == "drop":
        kept, all_ = own.samples, own.samples + own.overlong
        return [
            f"{those}: they are dropped, and ODB trains on {kept:,} of {all_:,}, so its speed is not compared with "
            f"Standard's; to keep them, {remedy}."
        ]
    return [f"{those}: each is trained on alone, in a micro-batch that takes more memory than the budget; {remedy}."]
