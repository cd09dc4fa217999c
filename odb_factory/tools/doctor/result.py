"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"
    """Training works, or only some runs would not; worth knowing."""
    FAIL = "FAIL"
    """Training would break, or would not be what the recipe asks for."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Raises:
        ValueError: a warning or a failure without its remedy.
    """

    name: str
    """The check, as `--only` knows it."""
    status: Status
    found: str
    remedy: str = ""
    """What to do; empty where all is well."""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) == bool(self.remedy):
            raise ValueError(f"the check {self.name} found {self.status} and has the remedy {self.remedy!r}.")


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, Status.OK, found)


def warn(name: str, found: str, remedy: str) -> Check:
    """Training works, but."""
    return Check(name, Status.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    """Training would break."""
    return Check(name, Status.FAIL, found, remedy)
