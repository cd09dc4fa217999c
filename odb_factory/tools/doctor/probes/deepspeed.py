"""Imports DeepSpeed."""

from __future__ import annotations

from odb_factory.tools.doctor.process import answer


def look() -> dict[str, str]:
    """`version`."""
    import deepspeed

    return {"version": str(deepspeed.__version__)}


if __name__ == "__main__":
    answer(look())
