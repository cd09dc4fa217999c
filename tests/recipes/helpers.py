"""The recipes and the overrides that their README names, and ways to run several of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.llamafactory.cli import SCRIPTS, free_port, launch

FOLDER = ROOT / "yaml_recipes"
PUBLIC = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*/qwen3vl_*.yaml"))
"""The recipes of the public datasets."""
QUICKSTARTS = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("quickstart*.yaml"))


def readme_ways() -> dict[str, list[str]]:
    """The overrides in the README's table of other ways to run a recipe, by the way's name."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    section = text.split("## The same recipe in another way")[1].split("\n## ")[0]
    return {name: overrides.split() for name, overrides in re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", section, re.M)}


WAYS = {"ODB": [], **readme_ways()}

OVERRIDES = {
    **{way: WAYS[way] for way in ("ODB", "Standard", "Sorted")},
    "packing": ["odb=false", "packing=true", "per_device_train_batch_size=1"],
}
"""The ways that run here: packing without `neat_packing`, which needs flash-attn."""

SMALL = [
    "use_cpu=true",
    "ddp_backend=gloo",
    "bf16=false",
    "max_steps=2",
    "preprocessing_num_workers=1",
    "dataloader_num_workers=1",
    "cutoff_len=512",
    "odb_token_budget=1024",
    "odb_audit=true",
]
"""What makes a run small; model, data and output are to be added. DeepSpeed stays."""


def in_turn(jobs: Sequence[Sequence[str]], folder: Path, *, ranks: int, parse: bool = False) -> list[list[str]]:
    """Run commands of `llamafactory-cli train`, all in the same `ranks` processes.

    Returns:
        By job, then by rank: `done` or `failed`, and what there is to say.
    """
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps([list(job) for job in jobs]), encoding="utf-8")
    command = [str(SCRIPTS / "torchrun"), "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    command += ["-m", "tests.recipes.turns", str(folder / "jobs.json"), str(folder), *(["--parse"] if parse else [])]
    launch(command, folder / "log", {"OMP_NUM_THREADS": "1"})
    return [[(folder / f"{job}.{rank}").read_text() for rank in range(ranks)] for job in range(len(jobs))]


def command_line(arguments: Sequence[str], log: Path, *, ranks: int) -> str:
    """`llamafactory-cli train` as a user types it; returns its log."""
    environment = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(free_port())}
    return launch([sys.executable, str(SCRIPTS / "llamafactory-cli"), "train", *arguments], log, environment)
