"""The two reductions of a round, over a Gloo group of their own (apart from the trainer's NCCL group)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from odb_factory.runtime.errors import ExchangeError
from odb_factory.runtime.rendezvous import Rendezvous

NEVER = timedelta(days=30)
"""Time-out of what must not time out."""


class Exchange(Protocol):
    """Element-wise reductions over all ranks; every rank calls them in the same order, with vectors of one length."""

    count: int
    """Reductions so far."""
    sent_bytes: int
    """Bytes that this rank put into them."""

    def minimum(self, values: Sequence[int], what: str) -> list[int]:
        """The element-wise minimum; `what` names the occasion in errors."""
        ...

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        """The element-wise sum."""
        ...


class LocalExchange:
    """The exchange of a world of one rank: nothing is sent."""

    def __init__(self) -> None:
        self.count = 0
        self.sent_bytes = 0

    def minimum(self, values: Sequence[int], what: str) -> list[int]:
        return list(values)

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        return list(values)


class GlooExchange:
    """Reductions through a `ProcessGroupGloo` that is built from a rendezvous, not from torch's global state.

    Args:
        rendezvous: where to meet; all ranks must come within `timeout`.
        timeout: seconds within which all ranks must come. The reductions have no time-out of their own: while the
            trainers pause together, for an evaluation say, one rank may wait here for as long as that takes. A trainer
            that waits for data raises (`Session.next`), which ends this process too.

    Raises:
        ExchangeError: a rank did not come, or died.
    """

    def __init__(self, rendezvous: Rendezvous, timeout: float) -> None:
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.count = 0
        self.sent_bytes = 0
        limit = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, None, is_master=False, timeout=limit)
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("odb", store), self.rank, self.world_size, limit)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size} could not meet the others at {rendezvous.host}:"
                f"{rendezvous.port} within {timeout:g} s; check that all ranks started and reach that address "
                f"(GLOO_SOCKET_IFNAME picks the network interface): {_first_line(error)}"
            ) from error

    def minimum(self, values: Sequence[int], what: str) -> list[int]:
        return self._reduce(values, dist.ReduceOp.MIN, what)

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        return self._reduce(values, dist.ReduceOp.SUM, what)

    def _reduce(self, values: Sequence[int], op: dist.ReduceOp.RedOpType, what: str) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = NEVER
        try:
            self._group.allreduce([tensor], options).wait()  # type: ignore[attr-defined]  # missing in torch's stub
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size} lost the others in {what}: another rank ended; look for the "
                f"first error among the ranks: {_first_line(error)}"
            ) from error
        self.count += 1
        self.sent_bytes += tensor.nbytes
        result: list[int] = tensor.tolist()
        return result


def connect(rendezvous: Rendezvous | None, timeout: float) -> Exchange:
    """The exchange of this rank; `None` for a world of one."""
    return LocalExchange() if rendezvous is None else GlooExchange(rendezvous, timeout)


def try_gloo() -> object:
    """A Gloo group of this process alone, in which one reduction was made. To be kept: ending it may take a while.

    A process that was forked while a thread of its parent held a lock inside torch (such as that of the flight
    recorder, which each collective of each Gloo group takes) finds it locked for ever. Then it hangs in here, before
    any other rank counts on it, and not beyond the reach of every time-out in the middle of a meeting.

    Raises:
        ExchangeError: Gloo does not work on this machine.
    """
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
        group.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(
            "this machine cannot open a Gloo connection; check its host name and network interfaces "
            f"(GLOO_SOCKET_IFNAME picks one): {_first_line(error)}"
        ) from error
    return group


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
