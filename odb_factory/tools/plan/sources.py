"""Whether the model and datasets of a recipe exist and can be read; checked before LLaMA-Factory, and if it fails."""

from __future__ import annotations

import difflib
import json
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from odb_factory.tools.data.output import ELSEWHERE, INFO_NAME
from odb_factory.tools.data.sets import SETS
from odb_factory.tools.plan.recipe import Recipe, RecipeError, shorten

SOURCES = {"file_name", *ELSEWHERE}
"""Keys of an entry that say where its data is."""
DEMO = "odb_demo"
"""The first part of paths that `odb-factory demo` makes."""


def check_model(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe's model is a local path that does not exist; hub names are not looked up."""
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
    """Raise RecipeError if the recipe's datasets are not described, or their files do not exist."""
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
    """Raise RecipeError for an entry whose form would make LLaMA-Factory fail."""
    place = f"{os.path.join(directory, INFO_NAME)}: the entry of dataset {name}"
    if not isinstance(entry, dict):
        raise RecipeError(f'{place} must be a mapping such as {{"file_name": "rows.json"}}, got {entry!r}; correct it.')
    if not SOURCES & entry.keys():
        raise RecipeError(f"{place} does not say where the data is; add file_name.")
    for key in SOURCES & entry.keys():
        if not isinstance(entry[key], str):
            raise RecipeError(f"{place} has the {key} {entry[key]!r}, which must be a string; correct it.")
    for key in ("columns", "tags"):
        mapping = entry.get(key, {})
        if not isinstance(mapping, dict) or not all(
            value is None or isinstance(value, str) for value in mapping.values()
        ):
            raise RecipeError(f"{place} has the {key} {mapping!r}, which must map names to strings; correct it.")
    file = entry.get("file_name")
    if file is not None and os.path.isdir(path := os.path.join(directory, file)) and not os.listdir(path):
        raise RecipeError(f"the directory {path} of dataset {name} is empty; put the data files there.")


def _read_info(recipe: Recipe, path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            info = json.load(file)
    except FileNotFoundError:
        raise RecipeError(
            f"{recipe.path}: there is no {path}, which must describe the datasets; correct dataset_dir"
            f"{_prepared(recipe.data_args.dataset)}."
        ) from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read ({shorten(error)}); fix it.") from error
    if not isinstance(info, dict):
        raise RecipeError(f"{path} does not describe datasets: it must map names to entries; fix it.")
    return info


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def _demo(path: str) -> str:
    return f" (make the demo with: odb-factory demo --dir {DEMO})" if path.split(os.sep)[0] == DEMO else ""


def _prepared(names: Sequence[str]) -> str:
    """A hint on how to fetch the data, for the datasets of our own recipes."""
    commands = [command for command, public in SETS.items() if public.name in names]
    return f" (get the data with: odb-factory data {commands[0]})" if commands else ""


def explain(recipe: Recipe, error: BaseException) -> None:
    """Raise RecipeError if the field or file at fault can be identified, else return."""
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    val_size = recipe.data_args.val_size
    if "train_test_split" in frames:
        raise RecipeError(
            f"{recipe.path}: val_size {val_size} leaves nothing to train on, or asks for more rows than there are "
            f"({shorten(error)}); lower it."
        ) from error
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    for name, file in _local_files(recipe):
        try:
            fault = fault_of(file)
        except OSError as unreadable:
            raise RecipeError(f"{file} of dataset {name} cannot be read ({unreadable}).") from error
        if fault is not None:
            raise RecipeError(f"{file} of dataset {name} cannot be used: {fault}; fix the file.") from error
        columns = columns_of(file) if isinstance(key, str) else None
        if columns is not None and key not in columns and key in wanted_columns(recipe, name):
            raise RecipeError(
                f"the rows of {file} have no column {key} (they have {', '.join(columns)}); correct columns or "
                f"formatting of dataset {name} in {os.path.join(recipe.data_args.dataset_dir, INFO_NAME)}."
            ) from error
        if key is not None and key in _message_keys(recipe, name):
            raise RecipeError(
                f"a message in {file} has no {key}; fix the file, or correct tags of dataset {name} in "
                f"{os.path.join(recipe.data_args.dataset_dir, INFO_NAME)}."
            ) from error


def places(recipe: Recipe) -> str:
    """The recipe's datasets in local files or folders, with their paths; empty if there are none."""
    directory = recipe.data_args.dataset_dir
    found = [(name, entry["file_name"]) for name, entry in entries(recipe).items() if "file_name" in entry]
    return ", ".join(f"{name} ({os.path.join(directory, file)})" for name, file in found)


def entries(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The entries of the recipe's datasets in dataset_info.json; empty if there is no such local file."""
    directory = recipe.data_args.dataset_dir
    try:
        info = json.loads(Path(directory, INFO_NAME).read_text(encoding="utf-8"))
        return {name: info[name] for name in recipe.data_args.dataset if isinstance(info[name], dict)}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _local_files(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """(dataset, file) for each local file."""
    for name, entry in entries(recipe).items():
        if set(ELSEWHERE) & entry.keys():
            continue
        path = Path(recipe.data_args.dataset_dir, entry["file_name"])
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        yield from ((name, file) for file in files if file.is_file())


def _attributes(recipe: Recipe, name: str) -> Any:
    from llamafactory.data.parser import get_dataset_list

    (attributes,) = get_dataset_list([name], recipe.data_args.dataset_dir)
    return attributes


def _message_keys(recipe: Recipe, name: str) -> set[str]:
    """The keys that LLaMA-Factory reads in each message."""
    attributes = _attributes(recipe, name)
    return {attributes.role_tag, attributes.content_tag} if attributes.formatting == "sharegpt" else set()


def wanted_columns(recipe: Recipe, name: str) -> set[str]:
    """The columns that LLaMA-Factory reads of a local dataset."""
    attributes = _attributes(recipe, name)
    fields = ("prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios")
    return {column for field in fields if (column := getattr(attributes, field))}


def fault_of(file: Path) -> str | None:
    """What is wrong with a data file, and where; None if nothing was found. Raises OSError."""
    if file.stat().st_size == 0:
        return "it is empty"
    if file.suffix == ".parquet":
        return _parquet_fault(file)
    if file.suffix not in (".json", ".jsonl"):
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    try:
        rows = _rows(text)
    except json.JSONDecodeError as error:
        return f"it is not valid JSON at line {error.lineno}, column {error.colno} ({error.msg})"
    except RecursionError:
        return "its JSON is nested too deep"
    if not isinstance(rows, list):
        return "it holds no list of rows"
    if not rows:
        return "it holds no rows"
    odd = next((number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)), None)
    return None if odd is None else f"row {odd} is not a mapping of columns to values"


def _rows(text: str) -> Any:
    """The rows of a JSON or JSON Lines file; json.JSONDecodeError has the line number in the file."""
    try:
        found = json.loads(text)
        return [found] if isinstance(found, dict) else found
    except json.JSONDecodeError:
        if text.lstrip()[:1] == "[":
            raise
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                error.lineno = number
                raise
    return rows


def _parquet_fault(file: Path) -> str | None:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            return None if opened.metadata.num_rows else "it holds no rows"
    except (pyarrow.ArrowException, OSError) as error:
        return shorten(error)


def columns_of(file: Path) -> list[str] | None:
    """The column names of the first row; None for formats that are not read here."""
    if file.suffix in (".json", ".jsonl"):
        rows = _rows(file.read_text(encoding="utf-8"))
        return list(rows[0])
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return list(parquet.read_schema(file).names)
    return None
