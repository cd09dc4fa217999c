"""Where the collate processes of all ranks meet: address and port of a store that rank 0's trainer process serves."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from odb_factory.runtime.errors import ExchangeError


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


def serve_store(timeout: float) -> dist.TCPStore:
    """A store on a free port of this machine; it lives as long as the returned object."""
    return dist.TCPStore("0.0.0.0", 0, None, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def meet(rank: int, world_size: int, timeout: float) -> tuple[Rendezvous, dist.TCPStore | None]:
    """Agree on a fresh rendezvous through the trainer's default process group. Collective: every rank calls it.

    Returns:
        the rendezvous, and on rank 0 the store, to be kept alive while it is in use.

    Raises:
        ExchangeError: there are several ranks and no default process group to agree through.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size):
        raise ExchangeError(
            f"{world_size} ranks need a torch.distributed process group of that size to agree on a rendezvous; call "
            "init_process_group first, or pass OdbDataLoader(rendezvous=...)."
        )
    store = serve_store(timeout) if rank == 0 else None
    place = [(_own_address(), store.port) if store is not None else None]
    dist.broadcast_object_list(place, src=0)
    if place[0] is None:
        raise ExchangeError(f"rank {rank} got no rendezvous from rank 0.")
    host, port = place[0]
    return Rendezvous(host=host, port=port, rank=rank, world_size=world_size), store


def _own_address() -> str:
    """An address of rank 0 that all ranks can reach: the launcher's MASTER_ADDR, which is rank 0's by definition."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
