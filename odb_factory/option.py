"""How an option is declared: once, with its default, its meaning and its values.

A dataclass declares an option as `field(default=..., metadata=option("meaning", check))`. Validation, the recipe fields
of LLaMA-Factory and of its v1, their `--help` and the table in docs/fields.md are made from that, so that a new option
is a new field of `OdbConfig` (and a line in the tables of tests/core/test_config.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Value of a recipe field that has the option found out."""

Check = Callable[[Any], str | None]
"""Says in words what is allowed, for a value that is not; None: it is."""

KEY = "option"
"""Where a field's metadata has its `Option`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is declared of an option beside its name, type and default."""

    help: str
    """Its meaning, as users read it (Markdown)."""
    check: Check
    choices: tuple[str, ...] = ()
    """The values of an option that is a choice."""
    in_recipe: bool = True
    """A field of recipes says it."""
    recipe_default: Any = ...
    """The default in recipes; `...`: the same."""
    auto: bool = False
    """A recipe may say `auto`."""
    unset: str = "none"
    """What holds where a recipe's default is None, in words."""

    def require(self, name: str, value: Any) -> None:
        """Raise ValueError for a value that is not allowed; `name` is how the user knows the option."""
        allowed = self.check(value)
        if allowed is not None:
            raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def option(help: str, check: Check | None = None, *, choices: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """The metadata of a dataclass field that is an option; an option without `check` is one of `choices`."""
    return {KEY: Option(help=help, check=check or one_of(choices), choices=choices, **more)}


def options_of(declaring: Any) -> Mapping[str, Option]:
    """The options of a dataclass, or of an instance of it, by name."""
    return {field.name: field.metadata[KEY] for field in dataclasses.fields(declaring) if KEY in field.metadata}


def check_options(instance: Any) -> None:
    """Raise ValueError for the first option of a dataclass instance whose value is not allowed."""
    for name, declared in options_of(instance).items():
        declared.require(name, getattr(instance, name))


def integer(least: int | None = None, *, most: int | None = None, optional: bool = False, unit: str = "") -> Check:
    """An integer of at least and at most so much, or None where it is optional."""
    kind = {None: "an integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            return f"{kind} ({unit})" if unit else kind
        return f"at most {most}" if most is not None and value > most else None

    return check


def number(kind: str, fits: Callable[[float], bool]) -> Check:
    """A number that fits; `kind` says in words which do."""

    def check(value: Any) -> str | None:
        return None if isinstance(value, int | float) and not isinstance(value, bool) and fits(value) else kind

    return check


def switch(value: Any) -> str | None:
    """True or false. A quoted "false" would count as true."""
    return None if isinstance(value, bool) else "true or false"


def one_of(choices: tuple[str, ...]) -> Check:
    """One of several words."""
    return lambda value: None if value in choices else f"one of {', '.join(choices)}"
