"""`python -m tests.formal [FAMILY ...]`: run the searches and print what each covered."""

from __future__ import annotations

import sys

from tests.formal.report import run_all, summed
from tests.formal.search import Result
from tests.formal.spaces import FAMILIES


def main(names: list[str]) -> int:
    """Print a table configuration -> states, transitions, seconds; 1 where a guarantee does not hold."""
    unknown = set(names) - set(FAMILIES)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    row = "{:>8} {:>11} {:>7}  {}"
    print(row.format("states", "transitions", "seconds", "configuration"))
    everything: list[Result] = []
    failed = False
    for name in names or FAMILIES:
        results: list[Result] = []
        for space, result in run_all(FAMILIES[name].spaces()):
            if isinstance(result, str):
                failed = True
                print(result, flush=True)
            else:
                results.append(result)
                print(row.format(result.states, result.transitions, f"{result.seconds:.1f}", space), flush=True)
        total = summed(results)
        print(row.format(total.states, total.transitions, f"{total.seconds:.1f}", f"all of: {name}\n"), flush=True)
        everything += results
    total = summed(everything)
    print(row.format(total.states, total.transitions, f"{total.seconds:.1f}", f"all {len(everything)} configurations"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
