"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity."""

    OK = "OK"
    WARN = "WARN"
    """Training works, perhaps with exceptions."""
    FAIL = "FAIL"
    """Training would fail, or would not do what the recipe says."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Raises:
        ValueError: a warning or failure without a remedy, or an OK with one.
    """

    name: str
    """The check's name, as for `--only`."""
    status: Status
    found: str
    remedy: str = ""
    """What to do; empty if all is well."""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) == bool(self.remedy):
            raise ValueError(f"the check {self.name} found {self.status} and has the remedy {self.remedy!r}.")


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, Status.OK, found)


def warn(name: str, found: str, remedy: str) -> Check:
    """Training works, with a reservation."""
    return Check(name, Status.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    """Training would break."""
    return Check(name, Status.FAIL, found, remedy)
