"""Prints the bad-input table: `python -m tests.bad_samples`. Exit code 1: something is not as it must be."""

from __future__ import annotations

import sys

import tests.conftest  # noqa: F401  (the settings of all tests)
from tests.bad_samples.run import table


def main() -> int:
    lines = table()
    lines.insert(1, ["---"] * len(lines[0]))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    return int(any("FAILED" in cell for line in lines for cell in line))


if __name__ == "__main__":
    sys.exit(main())
