"""`odb-factory doctor`: checks whether a training run would work on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.registry import CHECKS, run_checks
from odb_factory.tools.doctor.result import Check, Status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object: ok, checks")
    parser.add_argument("--only", metavar="CHECK", action="append", default=[], help="run only this check; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and what each looks at")
    parser.add_argument(
        "--odb-port", type=int, default=0, help="the recipe's odb_port, to be tested (default: any free port)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the checks; returns the exit status: 0, 1 if something would break training, or 130 after Ctrl-C.

    Raises:
        ValueError: an unknown check, or an impossible port.
    """
    if options.list:
        for name, function in CHECKS.items():
            print(f"{name:14} {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if unknown := [name for name in options.only if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; --only takes one of {', '.join(CHECKS)}.")
    if not 0 <= options.odb_port <= 65535:
        raise ValueError(f"--odb-port must be from 0 to 65535, got {options.odb_port}.")
    checks: list[Check] = []
    try:
        with Machine(odb_port=options.odb_port) as machine:
            for check in run_checks(machine, options.only):
                checks.append(check)
                if not options.json:
                    print(_line(check), flush=True)
    except KeyboardInterrupt:
        print("odb-factory: interrupted.", file=sys.stderr)
        return 130
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    healthy = not counts[Status.FAIL]
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        verdict = "Nothing found that would break training" if healthy else "Training would break"
        print(f"{verdict}: {counts[Status.OK]} OK, {counts[Status.WARN]} WARN, {counts[Status.FAIL]} FAIL.")
    return 0 if healthy else 1


def _line(check: Check) -> str:
    remedy = f"\n{'':21}-> {check.remedy}" if check.remedy else ""
    return f"{check.status:4}  {check.name:14} {check.found}{remedy}"
