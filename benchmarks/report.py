"""Measured figures of `benchmarks/REPORT.md`: shared cursor, memory, scale, plan. Some minutes on two cores.

python -m benchmarks.report
"""

from __future__ import annotations

import subprocess
import sys

RUNS = (
    ("Shared cursor", ["benchmarks.assignment"]),
    ("Shared cursor, longer epochs", ["benchmarks.assignment", "--per-rank", "2000", "--worlds", "2", "8", "64"]),
    ("Memory", ["benchmarks.memory"]),
    ("Scale", ["benchmarks.scale"]),
    ("Plan", ["benchmarks.plan"]),
)


def main() -> None:
    for title, command in RUNS:
        print(f"## {title}\n\n`python -m {' '.join(command)}`\n", flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True)
        print(flush=True)


if __name__ == "__main__":
    main()
