"""Writes the table of recipe fields into fields.md: `python -m odb_factory.docs.generate`."""

from __future__ import annotations

from pathlib import Path

from odb_factory.llamafactory.fields import FIELDS, RecipeField

PAGE = Path(__file__).with_name("fields.md")

BEGIN = "<!-- from here to the end of the table: python -m odb_factory.docs.generate -->\n"
END = "<!-- end of the table -->\n"


def table() -> str:
    """The recipe fields, one a row."""
    rows = (f"| `{field.name}` | {_default(field)} | {field.option.help} |\n" for field in FIELDS)
    return "".join(["| field | default | meaning |\n", "|---|---|---|\n", *rows])


def _default(field: RecipeField) -> str:
    if field.default is None:
        return field.option.unset
    if isinstance(field.default, bool | str):
        return f"`{str(field.default).lower()}`"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def with_table(page: str) -> str:
    """A page with the current table between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return "".join([before, BEGIN, table(), END, after])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
