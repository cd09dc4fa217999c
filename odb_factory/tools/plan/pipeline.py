"""The recipe's real data pipeline without model weights: LLaMA-Factory's own loader, and our `OnlineDataset`."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.llamafactory.collator import COLLATOR_PAD_MULTIPLE, dummy_tokens
from odb_factory.llamafactory.media import pixel_dtype
from odb_factory.llamafactory.online_dataset import OnlineDataset, observe_online
from odb_factory.llamafactory.resolve import resolve_recipe
from odb_factory.llamafactory.seams import PREPROCESS, registry
from odb_factory.option import AUTO
from odb_factory.runtime.transport.samples import FailedSample, ObservedSample
from odb_factory.runtime.worker import ObservedDataset
from odb_factory.tools.plan.observed import Observed, RunWouldFail
from odb_factory.tools.plan.recipe import Recipe, RecipeError, quiet, translated
from odb_factory.tools.plan.sources import check_data, check_model, explain, places

PROBE = 16
"""Samples that this process reads before deciding whether worker processes are worth starting."""

WORKER_SECONDS = 8.0
"""Worker processes read the rest if this process would take longer than this."""


@dataclass(frozen=True)
class Pipeline:
    """A recipe's training split, and how its run would batch it."""

    dataset: OnlineDataset
    config: OdbConfig
    budget_is: str
    """`given` in the recipe, `default` (the worst case of its fixed batches), or `auto`, planned with the default."""


def open_pipeline(recipe: Recipe) -> Pipeline:
    """Load tokenizer, processor, template and rows; RecipeError if one of them cannot be loaded."""
    check_model(recipe)
    check_data(recipe)
    model = recipe.model_args.model_name_or_path
    with quiet():
        from llamafactory.data import get_template_and_fix_tokenizer
        from llamafactory.model import load_tokenizer

        # a copy: it may write the path of a downloaded model into the arguments
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
        config = _config(recipe, dummy)
    if len(dataset) == 0:
        raise RecipeError(f"the dataset {_names(recipe)} has no rows; put some in, or name another.")
    given = recipe.finetuning_args.odb_token_budget
    return Pipeline(dataset, config, "default" if given is None else AUTO if given == AUTO else "given")


def _config(recipe: Recipe, dummy: int) -> OdbConfig:
    """As the run makes it."""
    from llamafactory.model import load_config

    def model_config() -> Any:
        model = recipe.model_args.model_name_or_path
        with translated(f"no configuration of a model in {model}", "correct model_name_or_path"):
            return load_config(copy.copy(recipe.model_args))

    return resolve_recipe(
        recipe.finetuning_args,
        recipe.data_args,
        recipe.training_args,
        model_config=model_config,
        pad_to_multiple_of=COLLATOR_PAD_MULTIPLE,
        dummy_tokens=dummy,
    )


def _load_rows(recipe: Recipe, template: Any, module: dict[str, Any]) -> Any:
    """The rows of the training split in LLaMA-Factory's aligned format, as its own loader reads and splits them."""
    import transformers
    from llamafactory.data import loader

    data_args = copy.copy(recipe.data_args)
    data_args.eval_dataset = None  # not needed
    arguments = (template, recipe.model_args, data_args, recipe.training_args, "sft")
    names = places(recipe) or _names(recipe)
    remedy = "fix the dataset or its entry in dataset_info.json; where it comes from a hub, download it first"
    with translated(f"the dataset {names} could not be loaded", remedy), registry.replaced({PREPROCESS: _untouched}):
        transformers.set_seed(recipe.training_args.seed)  # the loader may draw random numbers
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
    """Indices of `count` rows chosen at random (all if there are no more), ascending."""
    if count >= size:
        return list(range(size))
    return sorted(random.Random(f"{seed}:plan").sample(range(size), count))


def observe(pipeline: Pipeline, count: int | None, seed: int) -> Observed:
    """Run `count` rows, chosen at random, through the pipeline (None: all); on a terminal, with a progress bar.

    Raises:
        RunWouldFail: none of them is usable.
        OSError: the machine ran out of memory or disk space.
    """
    size = len(pipeline.dataset)
    indices = draw(size, size if count is None else count, seed)
    metas: list[SampleMeta] = []
    dropped: list[Dropped] = []
    # `disable=None`: no bar where stderr is not a terminal
    bar = tqdm(_read(pipeline, indices), "reading rows", len(indices), unit=" rows", disable=None)
    with quiet(), bar:
        for item in bar:
            if isinstance(item, FailedSample):
                raise OSError(f"{item.message}; free some memory or disk space, or plan with a smaller --samples.")
            if isinstance(item, Dropped):
                dropped.append(item)
            else:
                metas.append(item)
    if not metas:
        first = dropped[0]
        raise RunWouldFail(
            f"none of the {len(indices)} rows that were read is usable (the first: {first.reason}: "
            f"{first.detail.rstrip('.')}); fix the data, or check columns and formatting in dataset_info.json."
        )
    return Observed(size, tuple(metas), tuple(dropped))


class _Metas(Dataset[SampleMeta | Dropped | FailedSample]):
    """What the run's workers observe, without the samples; bad and overlong samples are reported, not raised."""

    def __init__(self, pipeline: Pipeline) -> None:
        config = replace(pipeline.config, on_bad_sample="skip", overlong="keep")
        self._observed = ObservedDataset(pipeline.dataset, observe_online, config)

    def __getitem__(self, index: int) -> SampleMeta | Dropped | FailedSample:
        item = self._observed[0, index]  # epoch 0, the first one of the run
        return item.meta if isinstance(item, ObservedSample) else item


def _read(pipeline: Pipeline, indices: Sequence[int]) -> Iterator[SampleMeta | Dropped | FailedSample]:
    """Observe in order; with worker processes if that is faster."""
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
