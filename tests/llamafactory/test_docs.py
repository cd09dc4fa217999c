"""The pages under odb_factory/docs name what there is."""

from __future__ import annotations

import dataclasses
import re

import yaml

from odb_factory.docs import generate
from odb_factory.llamafactory.arguments import OdbFinetuningArguments
from odb_factory.trainer.telemetry import figures_of
from tests.conftest import ROOT

DOCS = ROOT / "odb_factory" / "docs"


def table(page: str, prefix: str) -> dict[str, list[str]]:
    """First cells that begin with `prefix`, and the other cells."""
    rows = re.findall(rf"^\| `({prefix}\w*)` \|(.*)\|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_the_table_of_fields_has_each_with_its_default() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(OdbFinetuningArguments) if f.name.startswith("odb")}
    rows = table("fields.md", "odb")
    assert set(rows) == set(fields)
    for name, (default, _) in rows.items():
        if fields[name] is not None:
            assert yaml.safe_load(default.strip("`")) == fields[name], name
        else:
            assert not re.fullmatch(r"`?[\d.]+`?", default), f"{name} has no number as its default"


def test_the_table_of_fields_is_the_one_that_is_generated() -> None:
    page = generate.PAGE.read_text(encoding="utf-8")
    assert page == generate.with_table(page), "stale: python -m odb_factory.docs.generate"


def test_the_table_of_figures_has_each() -> None:
    assert set(table("figures.md", "odb/")) == {f"odb/{name}" for name in figures_of({})}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("odb_factory/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    pages += ROOT.glob("yaml_recipes/*.md")
    assert len(pages) >= 6
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
