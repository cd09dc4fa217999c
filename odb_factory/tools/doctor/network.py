"""Checks of the network that need no other node: host names, interfaces, and the launcher's variables."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

LOOKUP_SECONDS = 10.0
"""How long a name server may take."""

LOOPBACK = ("127.", "::1")

LOOPBACK_INTERFACE = "lo"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

NO_CONNECTION = "the other nodes could not connect to this one"

RANK_COUNTS = ("auto", "gpu", "cpu", "xpu")
"""What torchrun accepts in place of a number of ranks."""


def addresses(host: str) -> list[str]:
    """The addresses that a host name resolves to within `LOOKUP_SECONDS`; [] if it does not resolve."""
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=look, daemon=True)  # a look-up cannot be interrupted
    thread.start()
    thread.join(LOOKUP_SECONDS)
    return list(dict.fromkeys(found))


def is_own_address(host: str) -> bool:
    """Whether a host name resolves to this machine."""
    return any(_can_bind(address) for address in addresses(host))


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # fails without IPv6 in the kernel
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def check_interface(machine: Machine) -> Iterator[Check]:
    """The network interface that Gloo will use: `GLOO_SOCKET_IFNAME`, else that of the host name."""
    several = _number(machine, "NNODES", 1) > 1
    known = [name for _, name in socket.if_nameindex()]
    useful = [name for name in known if not (several and name == LOOPBACK_INTERFACE)]
    set_it = f"Set {INTERFACE_VARIABLE} to one of {', '.join(useful)}"
    choose = set_it if useful else "Connect this machine to a network"
    if wanted := machine.environ.get(INTERFACE_VARIABLE):
        yield _wanted_interface(wanted, known, several, choose)
        return
    host = socket.gethostname()
    found = addresses(host)
    reachable = [address for address in found if not address.startswith(LOOPBACK)]
    if reachable or (found and not several):
        yield ok("interface", f"{host} is {', '.join(reachable or found)}")
        return
    what = f"the host name {host} " + (
        f"is {', '.join(found)}, not an address for others" if found else "does not resolve"
    )
    remedy = f"{choose}, or put the host name into /etc/hosts."
    if several:
        yield fail("interface", f"{what}: {NO_CONNECTION}", remedy)
    else:
        yield warn("interface", f"{what}: this works on one node only", remedy)


def _wanted_interface(wanted: str, known: Sequence[str], several: bool, choose: str) -> Check:
    names = [name for name in wanted.split(",") if name]
    if missing := [name for name in names if name not in known]:
        found = f"{INTERFACE_VARIABLE}={wanted}, but there is no network interface {', '.join(missing)}"
        return fail("interface", found, f"{choose}, or unset it.")
    if several and LOOPBACK_INTERFACE in names:
        return fail("interface", f"{INTERFACE_VARIABLE}={wanted}: {NO_CONNECTION}", f"{choose}, or unset it.")
    return ok("interface", f"{INTERFACE_VARIABLE}={wanted} exists")


def check_launcher(machine: Machine) -> Iterator[Check]:
    """RANK, WORLD_SIZE, NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT are consistent, if set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: machine.environ[name] for name in names if machine.environ.get(name)}
    problems = [*_number_problems(machine), *_world_problems(machine)] or [*_meeting_problems(machine)]
    for found, remedy in problems:
        yield fail("launcher", found, remedy)
    if not problems:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        yield ok("launcher", shown or "no variables of a launcher are set: one node, and any free port")


def _number(machine: Machine, name: str, default: int) -> int:
    try:
        return int(machine.environ.get(name) or default)
    except ValueError:
        return default


def _number_problems(machine: Machine) -> Iterator[tuple[str, str]]:
    smallest = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "NNODES": 1, "NODE_RANK": 0, "MASTER_PORT": 1}
    for name, least in smallest.items():
        value = machine.environ.get(name, "")
        if value and not (value.isdecimal() and int(value) >= least):
            yield f"{name}={value} is not a number of at least {least}", f"Correct or unset {name}."
    ranks = machine.environ.get("NPROC_PER_NODE", "")
    if ranks and ranks not in RANK_COUNTS and not (ranks.isdecimal() and int(ranks) >= 1):
        yield (
            f"NPROC_PER_NODE={ranks} is neither a number of at least 1 nor one of {', '.join(RANK_COUNTS)}",
            "Set NPROC_PER_NODE to the number of ranks on this machine, or unset it (one for each GPU).",
        )
    if _number(machine, "MASTER_PORT", 1) > 65535:
        yield "MASTER_PORT is above 65535", "Set MASTER_PORT to a free port below 65536."


def _world_problems(machine: Machine) -> Iterator[tuple[str, str]]:
    environ = machine.environ
    unset = "Unset RANK and WORLD_SIZE (torchrun sets them for each rank), or set both."
    if environ.get("RANK") and not environ.get("WORLD_SIZE"):
        yield f"RANK={environ['RANK']} is set, but not WORLD_SIZE", unset
    if not environ.get("RANK") and _number(machine, "WORLD_SIZE", 1) > 1:
        yield f"WORLD_SIZE={environ['WORLD_SIZE']} announces several ranks, but there is no RANK", unset
    for rank, size in (("RANK", "WORLD_SIZE"), ("NODE_RANK", "NNODES")):
        if environ.get(rank) and environ.get(size) and _number(machine, rank, 0) >= _number(machine, size, 1):
            yield f"{rank}={environ[rank]} is not below {size}={environ[size]}", f"Count {rank} from 0."


def _meeting_problems(machine: Machine) -> Iterator[tuple[str, str]]:
    host, port = machine.environ.get("MASTER_ADDR", ""), _number(machine, "MASTER_PORT", 0)
    several = _number(machine, "NNODES", 1) > 1
    first = "Set it on all nodes to the same value, of node 0."
    found = addresses(host) if host else []
    if host and not found:
        yield (
            f"MASTER_ADDR={host} does not resolve",
            "Set MASTER_ADDR to the address of node 0 as this machine knows it.",
        )
    elif several and not host:
        yield f"NNODES={machine.environ['NNODES']}, but MASTER_ADDR is not set (taken as 127.0.0.1)", first
    elif several and all(address.startswith(LOOPBACK) for address in found):
        yield f"NNODES={machine.environ['NNODES']}, but MASTER_ADDR={host} is this machine alone", first
    if several and not port:
        yield f"NNODES={machine.environ['NNODES']}, but MASTER_PORT is not set: each node would choose its own", first
    serves = _number(machine, "NODE_RANK", 0) == 0 and not machine.environ.get(
        "RANK"
    )  # in a rank, its own run uses the port
    if port and serves and (not found or is_own_address(host)) and (reason := port_problem(port)):
        yield f"MASTER_PORT={port} cannot be opened here: {reason}", "Set MASTER_PORT to a free port, or unset it."


def port_problem(port: int) -> str | None:
    """Why a TCP port of this machine cannot be opened; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            return error.strerror or str(error)
    return None
