"""The recipe's real data pipeline: rows by LLaMA-Factory's own loader, samples by `OnlineDataset`; no model weights."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.llamafactory.checks import recipe_attention, recipe_config
from odb_factory.llamafactory.collator import dummy_tokens
from odb_factory.llamafactory.hooks import PREPROCESS, registry
from odb_factory.llamafactory.media import pixel_dtype
from odb_factory.llamafactory.online_dataset import OnlineDataset, observe_online
from odb_factory.llamafactory.recipe import Recipe, RecipeError, quiet, translated
from odb_factory.plan.data_errors import explain, places
from odb_factory.plan.observed import Observed, RunWouldFail
from odb_factory.plan.sources import check_data, check_model
from odb_factory.runtime.transport.samples import FailedSample, ObservedSample
from odb_factory.runtime.worker import ObservedDataset
from odb_factory.trainer.options import AUTO, with_arguments

PROBE = 16
"""Samples that are read in this process before it is decided whether workers are worth their start."""

WORKER_SECONDS = 8.0
"""Workers read the rest where this process would take longer than that."""


@dataclass(frozen=True)
class Pipeline:
    """A recipe's training split, and how its run would batch it."""

    dataset: OnlineDataset
    config: OdbConfig
    budget_is: str
    """`given` in the recipe; `default`: the worst case of its fixed batches, which also stands for `auto`."""


def open_pipeline(recipe: Recipe) -> Pipeline:
    """Load tokenizer, processor, template and rows; RecipeError where one of them cannot be had."""
    check_model(recipe)
    check_data(recipe)
    model = recipe.model_args.model_name_or_path
    with quiet():
        from llamafactory.data import get_template_and_fix_tokenizer
        from llamafactory.model import load_config, load_tokenizer

        # a copy: it may put the place of a downloaded model into the arguments
        with translated(f"no tokenizer in {model}", "correct model_name_or_path, or download the model first"):
            module = load_tokenizer(copy.copy(recipe.model_args))
        with translated(f"template {recipe.data_args.template}", "correct template"):
            template = get_template_and_fix_tokenizer(module["tokenizer"], recipe.data_args)
        rows = _load_rows(recipe, template, module)
        with translated("template and processor", "correct template or model_name_or_path"):
            dataset = OnlineDataset(
                rows,
                template=template,
                tokenizer=module["tokenizer"],
                processor=module["processor"],
                data_args=recipe.data_args,
                dtype=pixel_dtype(recipe.model_args.compute_dtype),
            )
            dummy = dummy_tokens(template, module["tokenizer"], module["processor"])
        with translated(f"no configuration of a model in {model}", "correct model_name_or_path"):
            attention = recipe_attention(
                recipe.finetuning_args, recipe.data_args, lambda: load_config(copy.copy(recipe.model_args))
            )
    if len(dataset) == 0:
        raise RecipeError(f"the data set {_names(recipe)} has no rows; put some in, or name another.")
    given = recipe.finetuning_args.odb_token_budget
    return Pipeline(
        dataset, _config(recipe, dummy, attention), "default" if given is None else AUTO if given == AUTO else "given"
    )


def _config(recipe: Recipe, dummy: int, attention: int | None) -> OdbConfig:
    """As the run makes it."""
    config = recipe_config(recipe.finetuning_args, recipe.data_args, recipe.training_args)
    return replace(with_arguments(config, recipe.training_args), dummy_tokens=dummy, attention_length=attention)


def _load_rows(recipe: Recipe, template: Any, module: dict[str, Any]) -> Any:
    """The rows of the training split in LLaMA-Factory's aligned format, as its own loader reads and splits them."""
    import transformers
    from llamafactory.data import loader

    data_args = copy.copy(recipe.data_args)
    data_args.eval_dataset = None  # nothing of it is needed
    arguments = (template, recipe.model_args, data_args, recipe.training_args, "sft")
    names = places(recipe) or _names(recipe)
    remedy = "mend the data set or its entry in dataset_info.json; where it comes from a hub, download it first"
    with translated(f"the data set {names} could not be loaded", remedy), registry.replaced({PREPROCESS: _untouched}):
        transformers.set_seed(recipe.training_args.seed)  # of what the loader draws, where it draws
        try:
            return loader.get_dataset(*arguments, **module)["train_dataset"]
        except Exception as error:
            explain(recipe, error)
            raise


def _untouched(dataset: Any, *_: Any, **__: Any) -> Any:
    return dataset


def _names(recipe: Recipe) -> str:
    return ", ".join(recipe.data_args.dataset or ["(none)"])


def draw(size: int, count: int, seed: int) -> list[int]:
    """`count` of the rows, at random, or all of them where there are no more; ascending."""
    if count >= size:
        return list(range(size))
    return sorted(random.Random(f"{seed}:plan").sample(range(size), count))


def observe(
    pipeline: Pipeline, count: int | None, seed: int, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> Observed:
    """Run `count` rows, drawn at random, through the pipeline (None: all of them).

    Raises:
        RunWouldFail: none of them is usable.
        OSError: the machine ran out of something.
    """
    size = len(pipeline.dataset)
    indices = draw(size, size if count is None else count, seed)
    metas: list[SampleMeta] = []
    dropped: list[Dropped] = []
    with quiet():
        for done, item in enumerate(_read(pipeline, indices), start=1):
            if isinstance(item, FailedSample):
                raise OSError(f"{item.message}; free some memory or disk space, or plan with a smaller --samples.")
            if isinstance(item, Dropped):
                dropped.append(item)
            else:
                metas.append(item)
            on_progress(done, len(indices))
    if not metas:
        first = dropped[0]
        raise RunWouldFail(
            f"none of the {len(indices)} rows that were read is usable (the first: {first.reason}: "
            f"{first.detail.rstrip('.')}); mend the data, or check columns and formatting in dataset_info.json."
        )
    return Observed(size, tuple(metas), tuple(dropped))


class _Metas(Dataset[SampleMeta | Dropped | FailedSample]):
    """What the run's workers observe, without the samples themselves; bad ones and long ones are only told."""

    def __init__(self, pipeline: Pipeline) -> None:
        config = replace(pipeline.config, on_bad_sample="skip", overlong="keep")
        self._observed = ObservedDataset(pipeline.dataset, observe_online, config)

    def __getitem__(self, index: int) -> SampleMeta | Dropped | FailedSample:
        item = self._observed[0, index]  # of epoch 0, as the run's first one reads it
        return item.meta if isinstance(item, ObservedSample) else item


def _read(pipeline: Pipeline, indices: Sequence[int]) -> Iterator[SampleMeta | Dropped | FailedSample]:
    """In order; by worker processes where that is faster."""
    metas = _Metas(pipeline)
    start = time.monotonic()
    for index in indices[:PROBE]:
        yield metas[index]
    rest = indices[PROBE:]
    expected = (time.monotonic() - start) / PROBE * len(rest)
    cores = os.cpu_count() or 1
    if expected < WORKER_SECONDS or cores == 1:
        for index in rest:
            yield metas[index]
        return
    loader: DataLoader[Any] = DataLoader(
        metas,
        batch_size=None,
        sampler=list(rest),
        num_workers=min(cores, 16),
        collate_fn=_identity,
        multiprocessing_context="fork",
    )
    yield from loader


def _identity(item: Any) -> Any:
    return item
