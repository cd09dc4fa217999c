"""The cells of the paper's tables, and which of them a model may be fitted to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parent / "reference.yaml"
NODE_RANKS = 8
"""GPUs of a node of the paper."""

RATE, SPEEDUP, RATIO = "samples/s", "speedup", "ratio"
"""Quantities: emitted samples a second; a rate over Standard's of the same setting; ODB's rate over another method's.
"""

PAPER, PUBLIC = "paper", "public"
"""Sources: the paper; the example records of the public package."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a cell was measured."""

    dataset: str
    model: str
    nodes: int
    source: str = PAPER

    @property
    def ranks(self) -> int:
        return NODE_RANKS * self.nodes

    def __str__(self) -> str:
        return f"{self.dataset} {self.model} {self.nodes} node{'s' * (self.nodes > 1)} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the paper, or a range that some settings lie in."""

    table: str
    """`single node`, `two nodes`, `MM-Mix`, `oracles`, `Sorted` or `public records`."""
    settings: tuple[Setting, ...]
    """One; several where a range covers them."""
    method: str
    """As in `benchmarks.batchers.METHODS`."""
    quantity: str
    low: float | None = None
    high: float | None = None
    """The number, or the range; None: not known."""
    tuning: str | None = None
    against: str = "standard"
    """Method that a speed-up or ratio is relative to."""
    note: str = ""

    @property
    def is_range(self) -> bool:
        return len(self.settings) > 1 or self.low != self.high

    @property
    def may_be_fitted(self) -> bool:
        """Only Standard's own throughput; every other cell is to be predicted."""
        return self.method == "standard" and self.quantity == RATE and not self.is_range and self.low is not None


@functools.cache
def reference() -> dict[str, Any]:
    """The content of `reference.yaml`."""
    import yaml

    values: dict[str, Any] = yaml.safe_load(REFERENCE.read_text(encoding="utf-8"))
    return values


def cells() -> tuple[Cell, ...]:
    """All cells of throughput."""
    return (*_throughput(), *_ranges(), *_oracles(), *_sorted(), *_public())


def _throughput() -> list[Cell]:
    found = []
    for row in reference()["throughput"]:
        setting = Setting(dataset=row["dataset"], model=row["model"], nodes=row["nodes"])
        name = "MM-Mix" if setting.dataset == "mm_mix" else "single node" if setting.nodes == 1 else "two nodes"
        for method, key, quantity in (
            ("standard", "standard", RATE),
            ("odb", "odb", RATE),
            ("odb", "speedup", SPEEDUP),
        ):
            value = row.get(key)
            found.append(
                Cell(
                    table=name,
                    settings=(setting,),
                    method=method,
                    quantity=quantity,
                    low=value,
                    high=value,
                    tuning=row.get("tuning"),
                )
            )
    return found


def _ranges() -> list[Cell]:
    found = []
    for row in reference()["speedup_ranges"].values():
        settings = tuple(
            Setting(dataset=dataset, model=model, nodes=row["nodes"])
            for dataset in ("ultrachat", "llava", "sharegpt4o")
            for model in ("2B", "8B")
        )
        low, high = row["range"]
        found.append(
            Cell(
                table="single node" if row["nodes"] == 1 else "two nodes",
                settings=settings,
                method="odb",
                quantity=SPEEDUP,
                low=low,
                high=high,
                tuning=row["tuning"],
                note="range over data sets and models",
            )
        )
    return found


def _oracles() -> list[Cell]:
    row = reference()["oracles"]
    share = row["within"]["share"]
    found = [
        Cell(
            table="oracles",
            settings=(Setting(dataset=dataset, model="8B", nodes=1),),
            method="odb",
            quantity=RATIO,
            low=1 - share,
            high=1 + share,
            against=oracle,
            note="model and nodes are our assumption",
        )
        for dataset in row["within"]["datasets"]
        for oracle in ("gmt", "bmt")
    ]
    for entry in row["sharegpt4o"]:
        low, high = entry["range"]
        settings = tuple(Setting(dataset="sharegpt4o", model=model, nodes=entry["nodes"]) for model in ("2B", "8B"))
        found.append(
            Cell(table="oracles", settings=settings, method="odb", quantity=SPEEDUP, low=low, high=high, note="range")
        )
    return found


def _sorted() -> list[Cell]:
    row = reference()["sorted_baseline"]
    setting = Setting(dataset=row["dataset"], model="8B", nodes=1)
    value = row["speedup"]
    note = "model and nodes are our assumption"
    return [
        Cell(table="Sorted", settings=(setting,), method="sorted", quantity=SPEEDUP, low=value, high=value, note=note)
    ]


def _public() -> list[Cell]:
    package = reference()["public_package"]
    found = []
    rates: dict[tuple[int, str], float] = {}
    for record in package["records"]:
        setting = Setting(dataset=package["dataset"], model=package["model"], nodes=record["nodes"], source=PUBLIC)
        rate = package["emitted_samples"] / record["runtime_s"]
        rates[record["nodes"], record["method"]] = rate
        given = {"table": "public records", "settings": (setting,), "method": record["method"]}
        found.append(Cell(**given, quantity=RATE, low=rate, high=rate))
        if record["method"] == "odb":
            ratio = rate / rates[record["nodes"], "standard"]
            found.append(Cell(**given, quantity=SPEEDUP, low=ratio, high=ratio, note="of the two records"))
    return found
