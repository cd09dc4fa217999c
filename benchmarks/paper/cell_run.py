"""A cell measured for real: `llamafactory-cli train` on a recipe, as ODB and in the other ways, on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.launch import train
from benchmarks.paper.cells import RATE
from benchmarks.rows import RowWriter, Value

WAYS: dict[str, dict[str, Any]] = {
    "odb": {"odb": True},
    "standard": {"odb": False},
    "sorted": {"odb": False, "train_sampling_strategy": "group_by_length"},
    "packing": {"odb": False, "packing": True, "neat_packing": True, "flash_attn": "fa2"},
}
"""Method -> the fields by which `yaml_recipes/README.md` makes it out of a recipe."""

TRAINING_ONLY = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "overwrite_output_dir": True,
    "resume_from_checkpoint": None,
}
"""The clock runs for training alone; every run starts from the recipe's own model."""

DATASETS = {"ultrachat_200k": "ultrachat", "llava_150k": "llava", "sharegpt4o_57k": "sharegpt4o"}
"""The recipes' names of data sets -> the paper's."""


@dataclass(frozen=True)
class Job:
    """A recipe that can run here."""

    recipe: Path
    values: dict[str, Any]
    ranks: int
    gpus: bool

    @property
    def data(self) -> str:
        name = str(self.values.get("dataset"))
        return DATASETS.get(name, name)

    @property
    def model(self) -> str:
        """`2B`, `8B`, ... where the name says it."""
        name = Path(str(self.values["model_name_or_path"])).name
        size = re.search(r"(\d+(?:\.\d+)?)B\b", name)
        return size.group(0) if size else name


def prepare(recipe: Path, overrides: Sequence[str], ranks: int | None) -> Job:
    """Read a recipe and check that this machine has what it needs.

    Raises:
        BenchmarkError: it has not; one sentence with the remedy.
    """
    import torch

    from odb_factory.tools.plan.recipe import RecipeError, read_values

    try:
        values = read_values(recipe, overrides)
    except RecipeError as error:
        raise BenchmarkError(str(error)) from None
    gpus = 0 if values.get("use_cpu") else torch.cuda.device_count()
    if not gpus and not values.get("use_cpu"):
        raise BenchmarkError(
            f"{recipe} trains on GPUs, and PyTorch finds none here; run it on a machine that has them, or add "
            "--set use_cpu=true to try a small model."
        )
    _check_data(recipe, values)
    _check_model(recipe, values)
    return Job(recipe, values, ranks or gpus or 1, bool(gpus))


def _check_data(recipe: Path, values: dict[str, Any]) -> None:
    from odb_factory.tools.data.output import ELSEWHERE, INFO_NAME

    folder = Path(str(values.get("dataset_dir", "data")))
    info = folder / INFO_NAME
    remedy = "make it first (`odb-factory data NAME`, or `odb-factory demo` for the quickstart)"
    if not info.is_file():
        raise BenchmarkError(f"{recipe} needs {info}, which is not here; {remedy}.")
    entries = json.loads(info.read_text(encoding="utf-8"))
    for name in map(str.strip, str(values.get("dataset", "")).split(",")):
        entry = entries.get(name)
        if entry is None:
            raise BenchmarkError(f"{recipe} needs the data set {name!r}, which {info} does not name; {remedy}.")
        file = folder / str(entry.get("file_name"))
        if not any(key in entry for key in ELSEWHERE) and not file.exists():
            raise BenchmarkError(f"{recipe} needs {file}, which is not here; {remedy}.")


def _check_model(recipe: Path, values: dict[str, Any]) -> None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = str(values.get("model_name_or_path"))
    if (Path(name) / "config.json").is_file():
        return
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # a path, not a name
        cached = False
    if not cached:
        raise BenchmarkError(
            f"{recipe} needs the model {name}, which is neither a folder here nor in the Hugging Face cache; fetch it "
            "first, so that no download is measured."
        )


def run_cell(
    job: Job,
    methods: Sequence[str],
    overrides: Sequence[str],
    *,
    folder: Path,
    deadline: float,
    seed: int,
    rows: RowWriter,
) -> None:
    """Train once in each way, one row each.

    Args:
        overrides: `key=value` of the user, which have the last word.
        folder: scratch; recipes and console output stay there.

    Raises:
        BenchmarkError: a run failed, or its throughput cannot be told.
    """
    if "packing" in methods and ("standard" not in methods or job.values.get("max_steps", -1) > 0):
        raise BenchmarkError(
            "the samples of packed rows are counted by a Standard run over the same whole epochs; add standard to "
            "--as, and leave max_steps out."
        )
    emitted: int | None = None
    for method in sorted(methods, key=("standard", "odb", "sorted", "packing").index):
        work = folder / method
        values = _fields(job, method, overrides, seed, work / "out")
        seconds = _train(job, method, values, work, deadline)
        if os.environ.get("NODE_RANK", "0") != "0":
            continue  # node 0 has the figures
        figures = read_run(work / "out", method, emitted)
        shutil.rmtree(work / "out")  # it holds a model
        if method == "standard":
            emitted = int(figures["emitted"] or 0)
        print(f"  {figures['samples_per_s']:.4g} samples/s in {figures['train_s']:.1f} s of training", flush=True)
        rows.add(
            what="cell",
            data=job.data,
            method=method,
            ranks=job.ranks * _nodes(),
            depth=values.get("odb_depth") if method == "odb" else None,
            budget=values.get("odb_token_budget") if method == "odb" else None,
            seed=seed,
            settings={
                "quantity": RATE,
                "model": job.model,
                "nodes": _nodes(),
                "tuning": str(values.get("finetuning_type", "lora")),
                "batch_size": values.get("per_device_train_batch_size"),
                "recipe": job.recipe.name,
            },
            figures={**figures, "command_s": seconds},
        )


def _train(job: Job, method: str, values: dict[str, Any], work: Path, deadline: float) -> float:
    """Seconds that the whole command took; its output directory is `work/out`, empty before."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "recipe.yaml").write_text(_yaml(values), encoding="utf-8")
    print(f"{method}: {job.recipe.name} on {job.ranks} ranks", flush=True)
    finished = train(
        work / "recipe.yaml",
        name=method,
        ranks=job.ranks,
        output_dir=work / "out",
        cache=work / "cache",
        console=work / "console.log",
        deadline=deadline,
        gpus=job.gpus,
    )
    shutil.rmtree(work / "cache", ignore_errors=True)
    return finished.wall_s


def _fields(job: Job, method: str, overrides: Sequence[str], seed: int, out: Path) -> dict[str, Any]:
    """The recipe's fields; the user's overrides, which `job.values` holds already, win over those of the method."""
    own = {override.split("=", 1)[0] for override in overrides}
    made = {**WAYS[method], **TRAINING_ONLY, "seed": seed}
    kept = {name: value for name, value in made.items() if name not in own or name == "odb"}
    return {**job.values, **kept, "output_dir": str(out)}


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def _nodes() -> int:
    return int(os.environ.get("NNODES", "1"))


def read_run(out: Path, method: str, standard_emitted: int | None) -> dict[str, Value]:
    """Throughput by the paper's definition, emitted samples over the wall-clock seconds of training.

    ODB counts what it emitted. Stock LLaMA-Factory counts the samples of the epochs, without those that complete the
    last step. Of packing it counts rows, so that the samples are those of Standard's run.

    Raises:
        BenchmarkError: the run left no figures.
    """
    file = out / "all_results.json"
    if not file.is_file():
        raise BenchmarkError(f"the {method} run wrote no all_results.json; it needs `do_train: true`.")
    results = json.loads(file.read_text(encoding="utf-8"))
    seconds = float(results["train_runtime"])
    if method == "odb":
        summary = json.loads((out / "odb_summary.json").read_text(encoding="utf-8"))
        return {
            "samples_per_s": summary["samples"] / seconds,
            "emitted": summary["samples"],
            "train_s": seconds,
            "real_tokens_per_s": summary["tokens"] / seconds,
            "padding": summary["padding"],
        }
    emitted = standard_emitted if method == "packing" else round(results["train_samples_per_second"] * seconds)
    if emitted is None:
        raise BenchmarkError("packing needs a Standard run before it.")
    return {"samples_per_s": emitted / seconds, "emitted": emitted, "train_s": seconds}
