"""Reads a recipe as LLaMA-Factory does, on any machine; every error becomes one sentence with a remedy."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.llamafactory.seams import SeamError, check_version
from odb_factory.tools.plan import MOST_SEED

VERBOSITY = "LLAMAFACTORY_VERBOSITY"
"""Environment variable that sets the log level of LLaMA-Factory's parser."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
"""Set by a launcher: with these the parser would try to connect to other ranks."""

MACHINE_FIELDS: dict[str, Any] = {
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "ddp_backend": None,
    "tf32": None,
    "enable_liger_kernel": False,
    "use_unsloth": False,
    "use_swanlab": False,
    "report_to": "none",
    "resume_from_checkpoint": None,
}
"""Fields that depend on the machine or the run, not on the data, and the values that planning replaces them with."""

RANGES: dict[str, tuple[int, int | None]] = {
    "seed": (0, MOST_SEED),
    "data_seed": (0, MOST_SEED),
    "max_samples": (1, None),
    "preprocessing_batch_size": (1, None),
    "preprocessing_num_workers": (1, None),
}
"""Integer fields that LLaMA-Factory does not check: the smallest and largest that work (None: no limit)."""

LONGEST_CAUSE = 300
"""Most characters of a library's message that are quoted."""


class RecipeError(ValueError):
    """A recipe, or something that it names, cannot be used; the message includes the remedy."""


@dataclass(frozen=True)
class Recipe:
    """LLaMA-Factory's arguments of a recipe with `odb: true`."""

    path: Path
    model_args: Any
    data_args: Any
    training_args: Any
    finetuning_args: Any
    given: Mapping[str, Any]
    """The fields as written, including those that planning replaces."""

    @property
    def overwrites(self) -> bool:
        """Whether a run starts over in its output_dir, whatever is there."""
        return bool(self.given.get("overwrite_output_dir", False))


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and `key=value` overrides as `llamafactory-cli train` does, except for `MACHINE_FIELDS`.

    Raises:
        RecipeError: it cannot be read, LLaMA-Factory rejects it, or `odb: true` does not support it.
    """
    file = Path(path)
    values = read_values(file, overrides)
    check_kind(file, values)
    _check_ranges(file, values)
    given = dict(values)
    for name in MACHINE_FIELDS.keys() & values.keys():
        values[name] = MACHINE_FIELDS[name]
    if values.get("pure_bf16") is True:
        values.update(pure_bf16=False, bf16=True)
    values.update(use_cpu=True, overwrite_output_dir=True)
    with translated(str(file), "fix the recipe"), quiet():
        model, data, training, finetuning = _parse(file, values)
    return Recipe(file, model, data, training, finetuning, given)


def read_values(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The fields of a recipe with overrides, unchecked; RecipeError if it is not a YAML mapping."""
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"{file} does not end in .yaml or .yml, as LLaMA-Factory's recipes do; name such a file.")
    if not file.is_file():
        raise RecipeError(f"there is no recipe {file}; check the path (it is relative to {Path.cwd()}).")
    for override in overrides:
        if not re.fullmatch(r"[A-Za-z_][\w.]*=.*", override, re.DOTALL):
            raise RecipeError(f"{override!r} is not an override; write key=value, such as odb_token_budget=8192.")
    from omegaconf import OmegaConf

    try:
        loaded = OmegaConf.load(file)
        values = None
        if OmegaConf.is_dict(loaded):
            values = OmegaConf.to_container(OmegaConf.merge(loaded, OmegaConf.from_cli(list(overrides))))
    except Exception as error:  # of the YAML parser, of OmegaConf, of the text's encoding, of the file system
        raise RecipeError(f"{file} cannot be read as YAML ({shorten(error)}); fix it.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{file} is not a recipe: it must hold `key: value` lines; fix it.")
    return {str(key): value for key, value in values.items()}


def check_kind(file: Path, values: dict[str, Any]) -> None:
    """Raise RecipeError for a recipe without `odb: true`, or of an unsupported stage."""
    stage = values.get("stage", "sft")
    if stage != "sft":
        raise RecipeError(f"{file}: stage {stage} is not supported by odb; plan a recipe of stage sft.")
    if not values.get("odb", False):
        raise RecipeError(
            f"{file} has no `odb: true`, so its batches are those of stock LLaMA-Factory; to see what ODB would bring, "
            f"add it to the recipe, or run: odb-factory plan {file} odb=true"
        )


def _parse(file: Path, values: dict[str, Any]) -> tuple[Any, ...]:
    # here, where `translated` turns the ImportError of a broken torch or transformers into a sentence
    from odb_factory.llamafactory.checks import check_recipe
    from odb_factory.trainer.options import check_samples_per_update

    try:
        check_version()
    except SeamError as error:
        raise RecipeError(str(error)) from error
    with _environment(dict.fromkeys(RANK_VARIABLES)):
        from llamafactory.hparams import get_train_args

        try:
            model, data, training, finetuning, _ = get_train_args(values)
        except ValueError as error:
            _explain_unknown_keys(file, error)
            raise
    _check_numbers(file, data, training)
    try:
        check_recipe(data, training, finetuning)
        check_samples_per_update(finetuning.odb_samples_per_update, training.gradient_accumulation_steps)
    except ValueError as error:  # its message says what to do
        raise RecipeError(f"{file}: {error}") from error
    return model, data, training, finetuning


def _check_numbers(file: Path, data: Any, training: Any) -> None:
    """Check the fields that a plan computes with; LLaMA-Factory's parser accepts any value from a YAML file."""
    for arguments, name in (
        (data, "cutoff_len"),
        (training, "per_device_train_batch_size"),
        (training, "gradient_accumulation_steps"),
    ):
        value = getattr(arguments, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError(f"{file}: {name} must be a positive integer, got {value!r}; correct it.")


def _check_ranges(file: Path, values: dict[str, Any]) -> None:
    """Check fields that LLaMA-Factory accepts as they are, and that would only fail later, where the data is read."""
    for name, (least, most) in RANGES.items():
        value = values.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least and (most is None or value <= most)):
            allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise RecipeError(f"{file}: {name} must be an integer {allowed}, got {value!r}; correct it.")
    value = values.get("val_size")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and (not number or value < 0 or (isinstance(value, float) and value == 1)):
        raise RecipeError(f"{file}: val_size must be a share below 1 or a number of rows, got {value!r}; correct it.")


def _explain_unknown_keys(file: Path, error: ValueError) -> None:
    """Raise RecipeError with the closest known names if `error` is about unknown keys."""
    found = re.search(r"keys are not used by the HfArgumentParser: \[(.*?)\]", str(error))
    if found is None:
        return
    import dataclasses

    from llamafactory.hparams import parser

    known = sorted({field.name for group in parser._TRAIN_ARGS for field in dataclasses.fields(group)})
    unknown = re.findall(r"'([^']*)'", found[1])
    if "odb" in unknown:
        raise RecipeError(
            "LLaMA-Factory does not know the field odb: its hook is switched off; unset ODB_FACTORY_DISABLE, or "
            "install odb-factory into this environment once more."
        ) from error
    guesses = [(name, difflib.get_close_matches(name, known, 1)) for name in unknown]
    texts = [f"{name} (did you mean {near[0]}?)" if near else name for name, near in guesses]
    raise RecipeError(f"{file}: LLaMA-Factory has no field {', '.join(texts)}; correct or remove it.") from error


def shorten(error: BaseException) -> str:
    """The first line of an exception's message, shortened, without a final full stop."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    mark = getattr(error, "problem_mark", None)  # of a YAML parser, whose message has many lines
    if mark is not None:
        lines = [f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'unreadable'}"]
    text = (lines[0] if lines else type(error).__name__).encode("utf-8", "backslashreplace").decode()
    return (text[:LONGEST_CAUSE] + " ..." if len(text) > LONGEST_CAUSE else text).rstrip(". ")


@contextlib.contextmanager
def translated(what: str, remedy: str) -> Iterator[None]:
    """Turn any exception raised inside, even `SystemExit`, into a RecipeError: what failed, why, and the remedy."""
    try:
        yield
    except RecipeError:
        raise
    except MemoryError:
        raise
    except ImportError as error:
        raise RecipeError(
            f"a package cannot be imported ({shorten(error)}); install it, or run: odb-factory doctor"
        ) from error
    except (Exception, SystemExit) as error:
        cause: BaseException = error
        # the message of an OSError or of an error of `datasets` is often only a headline
        while cause.__cause__ is not None and (
            isinstance(cause, OSError) or type(cause).__module__.startswith("datasets")
        ):
            cause = cause.__cause__
        name = "" if isinstance(cause, ValueError | OSError | RuntimeError) else f"{type(cause).__name__}: "
        raise RecipeError(f"{what}: {name}{shorten(cause)}; {remedy}.") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, LLaMA-Factory, transformers and datasets print nothing but errors."""
    import datasets
    import transformers

    # before stdout is redirected: the handler would keep the replacement
    from llamafactory.extras import logging as factory_logging

    loggers = [factory_logging.get_logger("llamafactory"), *map(logging.getLogger, ("transformers", "huggingface_hub"))]
    levels = [logger.level for logger in loggers]
    verbosity, bars = transformers.utils.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets_verbosity = datasets.utils.logging.get_verbosity()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({VERBOSITY: "ERROR", "TOKENIZERS_PARALLELISM": "false"}))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        transformers.utils.logging.set_verbosity_error()
        datasets.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            transformers.utils.logging.set_verbosity(verbosity)
            datasets.utils.logging.set_verbosity(datasets_verbosity)
            if bars:
                datasets.enable_progress_bars()


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside (None: unset) and restore them afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
