"""Whether what a recipe names is there: told before LLaMA-Factory looks for it in its own way."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from typing import Any

from odb_factory.tools.data.sets import SETS
from odb_factory.tools.dataset_info import ELSEWHERE, INFO_NAME
from odb_factory.tools.plan.recipe import Recipe, RecipeError, shorten

SOURCES = {"file_name", *ELSEWHERE}
"""Keys of an entry that say where its data is."""
DEMO = "odb_demo"
"""Names that begin so are those of `odb-factory demo`."""


def check_model(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe's model is a path at which there is none; a name of a hub is not looked up."""
    path = recipe.model_args.model_name_or_path
    if os.path.isdir(path):
        if not os.listdir(path):
            raise RecipeError(
                f"{recipe.path}: the directory {path} of model_name_or_path is empty; put the model there."
            )
        return
    local = os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1 or os.path.exists(path)
    if local or path.split("/")[0] == DEMO:
        raise RecipeError(
            f"{recipe.path}: there is no model directory {path} (model_name_or_path); correct the path, which is "
            f"relative to {os.getcwd()}{_demo(path)}."
        )


def check_data(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe's data sets are not described, or their files are not there."""
    data = recipe.data_args
    directory = data.dataset_dir
    if not isinstance(directory, str) or directory == "ONLINE" or directory.startswith("REMOTE:"):
        return
    if not os.path.isdir(directory):
        raise RecipeError(
            f"{recipe.path}: there is no directory {directory} (dataset_dir); correct the path, which is relative to "
            f"{os.getcwd()}{_demo(directory)}{_prepared(data.dataset)}."
        )
    info = _read_info(recipe, os.path.join(directory, INFO_NAME))
    for name in data.dataset:
        if name not in info:
            near = difflib.get_close_matches(name, info, 1)
            known = f"did you mean {near[0]}?" if near else f"it describes {_some(sorted(info))}"
            raise RecipeError(
                f"{recipe.path}: dataset {name} is not in {os.path.join(directory, INFO_NAME)} ({known}); correct the "
                f"name, or describe it there{_prepared([name])}."
            )
        _check_entry(name, info[name], directory)
        file = info[name].get("file_name")
        if file is not None and not os.path.exists(os.path.join(directory, file)):
            raise RecipeError(
                f"{recipe.path}: the file {os.path.join(directory, file)} of dataset {name} does not exist; put it "
                f"there, or correct file_name in {INFO_NAME}."
            )


def _check_entry(name: str, entry: Any, directory: str) -> None:
    """Raise RecipeError for an entry of a shape that LLaMA-Factory could only trip over."""
    place = f"{os.path.join(directory, INFO_NAME)}: the entry of dataset {name}"
    if not isinstance(entry, dict):
        raise RecipeError(f'{place} must be a mapping such as {{"file_name": "rows.json"}}, got {entry!r}; correct it.')
    if not SOURCES & entry.keys():
        raise RecipeError(f"{place} does not say where the data is; add file_name.")
    for key in SOURCES & entry.keys():
        if not isinstance(entry[key], str):
            raise RecipeError(f"{place} has the {key} {entry[key]!r}, which must be a text; correct it.")
    for key in ("columns", "tags"):
        mapping = entry.get(key, {})
        if not isinstance(mapping, dict) or not all(
            value is None or isinstance(value, str) for value in mapping.values()
        ):
            raise RecipeError(f"{place} has the {key} {mapping!r}, which must map names to texts; correct it.")
    file = entry.get("file_name")
    if file is not None and os.path.isdir(path := os.path.join(directory, file)) and not os.listdir(path):
        raise RecipeError(f"the directory {path} of dataset {name} is empty; put the data files there.")


def _read_info(recipe: Recipe, path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            info = json.load(file)
    except FileNotFoundError:
        raise RecipeError(
            f"{recipe.path}: there is no {path}, which must describe the data sets; correct dataset_dir"
            f"{_prepared(recipe.data_args.dataset)}."
        ) from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read ({shorten(error)}); mend it.") from error
    if not isinstance(info, dict):
        raise RecipeError(f"{path} does not describe data sets: it must map names to entries; mend it.")
    return info


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def _demo(path: str) -> str:
    return f" (make the demo with: odb-factory demo --dir {DEMO})" if path.split(os.sep)[0] == DEMO else ""


def _prepared(names: Sequence[str]) -> str:
    """How to get the data of our own recipes."""
    commands = [command for command, public in SETS.items() if public.name in names]
    return f" (get the data with: odb-factory data {commands[0]})" if commands else ""
