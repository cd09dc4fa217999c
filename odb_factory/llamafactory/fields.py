"""The recipe fields `odb*`, made of the options that are declared by `OdbConfig` and by what only a run needs."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any, Literal, get_type_hints

from odb_factory.config import OdbConfig
from odb_factory.option import AUTO, Option, options_of, switch
from odb_factory.trainer.options import SAMPLES_PER_UPDATE, AutoBudget

PREFIX = "odb_"
"""Of the name of an option, as recipes say it."""


class TokensOrAuto:
    """What a command-line flag says of a number of tokens: the number, `auto` or `null`; int, str or None."""

    def __new__(cls, text: str) -> Any:
        try:
            return text if text == AUTO else None if text == "null" else int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a number of tokens, {AUTO} or null, got {text!r}") from None


@dataclass(frozen=True)
class RecipeField:
    """An option as a recipe says it."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def help(self) -> str:
        """What `--help` says of it."""
        unset = f" Default: {self.option.unset}." if self.default is None else ""
        return f"{self.option.help}{unset}".replace("`", "")

    def check(self, value: Any) -> None:
        """Raise ValueError, in the name of the field, for a value that is not allowed."""
        if value is None and self.default is None:
            return
        if not (self.option.auto and isinstance(value, str)):
            self.option.require(self.name, value)
        elif value != AUTO:
            others = ", or auto" if self.option.check(None) else ", auto or null"
            raise ValueError(f"{self.name} must be a positive integer{others}, got {value!r}.")


def _declared(by: type, *names: str, prefix: str = PREFIX) -> Iterator[RecipeField]:
    """The recipe fields of options that a dataclass declares: of all, in their order, or of those named."""
    hints, options = get_type_hints(by), options_of(by)
    defaults = {field.name: field.default for field in dataclasses.fields(by)}
    for name in names or options:
        option, kind = options[name], hints[name]
        if not option.in_recipe:
            continue
        if option.auto:
            kind = TokensOrAuto | None
        elif option.choices:
            kind = Literal[option.choices]  # type: ignore[valid-type]
        default = defaults[name] if option.recipe_default is ... else option.recipe_default
        yield RecipeField(prefix + name, kind, default, option)


OF_CONFIG = {field.name.removeprefix(PREFIX): field for field in _declared(OdbConfig)}
"""Those that are fields of `OdbConfig`, by their names there."""

FIELDS = (
    RecipeField("odb", bool, False, Option(help="Online Dynamic Batching for this run.", check=switch)),
    OF_CONFIG["token_budget"],
    *_declared(AutoBudget, "headroom", prefix="odb_auto_"),
    *_declared(AutoBudget, "memory_limit"),
    RecipeField("odb_samples_per_update", int | None, None, SAMPLES_PER_UPDATE),
    *(field for name, field in OF_CONFIG.items() if name != "token_budget"),
    RecipeField(
        "odb_audit",
        bool,
        False,
        Option(
            help="Write `odb_audit.rank{r}.jsonl` into `output_dir`: a line a step with the indices of its samples.",
            check=switch,
        ),
    ),
)
"""All of them, in the order in which users see them."""


def check_fields(fields: Sequence[RecipeField], arguments: Any) -> None:
    """Raise ValueError for the first field whose value is not allowed, before anything is loaded."""
    for field in fields:
        field.check(getattr(arguments, field.name))


def extend(stock: type, checks: type, name: str, fields: Sequence[tuple[str, Any, Any]]) -> type:
    """A dataclass of LLaMA-Factory's arguments with more fields.

    Args:
        stock: LLaMA-Factory's own.
        checks: has the methods that are added; its module must have the result under `name`, by which pickle finds it.
        fields: name, type and `dataclasses.field` of each.
    """
    namespace = {"__module__": checks.__module__, "__doc__": checks.__doc__}
    return make_dataclass(name, fields, bases=(checks, stock), namespace=namespace)


def as_dataclass_fields(fields: Sequence[RecipeField]) -> list[tuple[str, Any, Any]]:
    """Recipe fields as LLaMA-Factory's parser reads them from a dataclass."""
    return [
        (field.name, field.type, dataclasses.field(default=field.default, metadata={"help": field.help}))
        for field in fields
    ]
