"""Checks that two ranks on this machine can communicate and run a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

SLOW_MEETING = 5.0
"""Seconds; a name server that does not answer costs 5 for each rank that connects."""

NETWORK = (
    "Choose the network with GLOO_SOCKET_IFNAME (`ip addr` lists them; lo for one node), let MASTER_ADDR and the host "
    "name resolve to this machine, let a firewall pass this machine's own connections, and see the check files."
)
PORT = "Set odb_port to a free port of rank 0's machine, or to 0 for any free one."
LOADER = "See the checks shared_memory, files, processes and storage; the message above names the place."


def check_gloo(machine: Machine) -> Iterator[Check]:
    """Two processes connect as collate processes do, and run reductions."""
    seen = machine.probe("ranks")["gloo"]
    if "error" in seen:
        remedy = PORT if machine.odb_port and "(odb_port)" in seen["error"] else NETWORK
        yield fail("gloo", f"two local processes cannot exchange: {_first_line(seen['error'])}", remedy)
        return
    met = max(rank["met_s"] for rank in seen["ranks"])
    took = max(rank["exchange_ms"] for rank in seen["ranks"])
    port = f", port {machine.odb_port}" if machine.odb_port else ""
    found = (
        f"two local processes met at {seen['ranks'][0]['host']}{port} in {met:.1f} s, an exchange takes {took:.2f} ms"
    )
    if met > SLOW_MEETING:
        yield warn(
            "gloo",
            found,
            "A name server that does not answer delays each connection: put the nodes into /etc/hosts, "
            "or export RES_OPTIONS='timeout:1 attempts:1'.",
        )
    else:
        yield ok("gloo", found)


def check_loader(machine: Machine) -> Iterator[Check]:
    """An epoch on two ranks, with forked collate processes and workers: each sample is emitted once."""
    report = machine.probe("ranks")
    if "loader" not in report:
        yield fail("loader", "not tried, since two processes cannot exchange", "See the check gloo.")
        return
    seen = report["loader"]
    if "error" in seen:
        yield fail("loader", f"a small epoch on two ranks failed: {_first_line(seen['error'])}", LOADER)
        return
    yield _judge(report["samples"], seen["ranks"])


def _judge(samples: int, ranks: list[Mapping[str, Any]]) -> Check:
    emitted = sorted(index for rank in ranks for index in rank["indices"])
    steps = {rank["steps"] for rank in ranks}
    if emitted != list(range(samples)) or len(steps) != 1:
        return fail(
            "loader",
            f"of {samples} samples {len(emitted)} were emitted ({len(set(emitted))} unique), in {steps} steps",
            "This is a bug of odb-factory: please report it with the output of `odb-factory doctor --json`.",
        )
    took = max(rank["seconds"] for rank in ranks)
    return ok(
        "loader",
        f"two ranks with forked collate processes emitted {samples} samples once each, in {steps.pop()} aligned steps "
        f"({took:.1f} s)",
    )


def _first_line(text: str) -> str:
    return text.splitlines()[0]
