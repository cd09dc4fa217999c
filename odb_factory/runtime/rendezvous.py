"""Where the collate processes of all ranks meet: address and port of a store that rank 0's trainer process serves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from odb_factory.runtime.errors import ExchangeError, names, other_rank

ASK_SECONDS = 2.0
"""How long the default group's store has to say which ranks started their loaders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A `TCPStore` that is being served, and this rank's place in the world that meets there."""

    host: str
    port: int
    rank: int
    world_size: int


def resolve_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks: as given, else those of `torch.distributed`, else (0, 1).

    Raises:
        ValueError: only one of the two, or a rank outside of the world.
        ExchangeError: the launcher announced several ranks but `torch.distributed` is not initialised, so that the
            ranks would batch unsynchronised.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither.")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        announced = int(os.environ.get("WORLD_SIZE", "1"))
        if announced > 1:
            raise ExchangeError(
                f"the environment announces {announced} ranks (WORLD_SIZE) but torch.distributed is not initialised; "
                "call init_process_group before the loader is made, or pass rank, world_size and rendezvous."
            )
        return 0, 1
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size} ranks.")
    return rank, world_size


def serve_store(timeout: float, port: int = 0) -> dist.TCPStore:
    """A store on `port` of this machine (0: any free one); it lives as long as the returned object.

    Raises:
        ExchangeError: the port is in use, or may not be opened.
    """
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore("0.0.0.0", port, None, is_master=True, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        reason = "it is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise ExchangeError(
            f"rank 0 cannot open port {port} (odb_port) for the meeting of the ranks: {reason}; choose another one, or "
            "0 for any free one."
        ) from error


def meet(rank: int, world_size: int, timeout: float, port: int = 0) -> tuple[Rendezvous, dist.TCPStore | None]:
    """Agree on a fresh rendezvous through the trainer's default process group. Collective: every rank calls it.

    Returns:
        the rendezvous, and on rank 0 the store, to be kept alive while it is in use.

    Raises:
        ExchangeError: there are several ranks and no default process group to agree through, or rank 0 cannot open
            the port; then on every rank.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size):
        raise ExchangeError(
            f"{world_size} ranks need a torch.distributed process group of that size to agree on a rendezvous; call "
            "init_process_group first, or pass OdbDataLoader(rendezvous=...)."
        )
    store, place = None, ("", 0, "")
    if rank == 0:
        try:
            store = serve_store(timeout, port)
            place = (_own_address(), store.port, "")
        except ExchangeError as error:
            place = ("", 0, str(error))
    host, port, failure = _broadcast(place, rank, world_size, timeout)
    if failure:
        raise ExchangeError(failure)
    return Rendezvous(host=host, port=port, rank=rank, world_size=world_size), store


def _broadcast(place: tuple[str, int, str], rank: int, world_size: int, timeout: float) -> tuple[str, int, str]:
    """Rank 0's `place`, on every rank.

    In a thread: the trainers' own group waits as long as *its* time-out says, and does not heed Ctrl-C meanwhile.
    """
    shared: list[Any] = [place]
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    roll = _RollCall(rank, world_size)

    def broadcast() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            roll.answer()
            dist.broadcast_object_list(shared, src=0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=broadcast, name="odb-meet", daemon=True)
    thread.start()
    end = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.1)
    where = f"rank {rank} of {world_size} could not meet the others through torch.distributed"
    if thread.is_alive():
        late = names(roll.missing()) or "some rank"
        raise ExchangeError(
            f"{where} within {timeout:g} s (odb_timeout): no loader was started on {late}; look there for what it "
            "waits for or failed with."
        )
    if errors:
        raise ExchangeError(
            f"{where}: {_who_ended(rank, world_size, roll.missing())}; look for the first error among the ranks: "
            f"{str(errors[0]).splitlines()[0]}"
        ) from errors[0]
    result: tuple[str, int, str] = shared[0]
    return result


def _who_ended(rank: int, world_size: int, missing: list[int]) -> str:
    """Of several ranks the one that is missing may just be late, and another one have ended in the meeting."""
    found = f"{other_rank(rank, world_size)} ended before its loader had started"
    return f"{found} ({names(missing)} did not come)" if missing and world_size > 2 else found


class _RollCall:
    """Which ranks came to this meeting: each says so in the store of the default group.

    Only for the text of an error: what the store does not say, or not soon, is left unsaid.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._meeting: int | None = None
        """Number of this meeting; the same on every rank, since all meet in the same order."""

    def answer(self) -> None:
        """This rank is here."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._meeting = self._came(self._rank, 1)

    def missing(self) -> list[int]:
        """The ranks that did not come, as far as the store says."""
        found: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                others = [rank for rank in range(self._world_size) if rank != self._rank]
                found.extend(rank for rank in others if self._came(rank, 0) < (self._meeting or 0))

        if self._meeting is not None:
            # a thread: the one that waits in the collective may keep the store for as long as it waits
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(ASK_SECONDS)
            if thread.is_alive():
                return []
        return found

    def _came(self, rank: int, more: int) -> int:
        """To how many meetings a rank has come, with `more` from now on."""
        return int(dist.distributed_c10d._get_default_store().add(f"odb_came_{rank}", more))


def _own_address() -> str:
    """An address of rank 0 that all ranks can reach: the launcher's MASTER_ADDR, which is rank 0's by definition."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
