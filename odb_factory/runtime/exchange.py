"""The reductions and prefix sums of a round, over a Gloo group of their own (apart from the trainer's NCCL group)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odb_factory.core.assignment import tree_children
from odb_factory.runtime.errors import ExchangeError, names, other_rank
from odb_factory.runtime.greeting import without_greeting
from odb_factory.runtime.rendezvous import Rendezvous

NEVER = timedelta(days=30)
"""Time-out of what must not time out."""

ANSWER_SECONDS = 5.0
"""How long the others have, once a rank is lost, to say that they are alive."""

MOST_ASKED = 256
"""World size up to which each survivor asks for all others: W squared questions to one store."""


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

    def prefix_sum(self, value: int, what: str) -> tuple[int, int]:
        """The sum of `value` over the ranks before this one (see `exclusive_sums`), and over all ranks."""
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

    def prefix_sum(self, value: int, what: str) -> tuple[int, int]:
        return 0, value


class GlooExchange:
    """Reductions through a `ProcessGroupGloo` that is built from a rendezvous, not from torch's global state.

    Args:
        rendezvous: where to meet; all ranks must come within `timeout`.
        timeout: seconds within which all ranks must come. The reductions have no time-out of their own: while the
            trainers pause together, for an evaluation say, one rank may wait here for as long as that takes. A trainer
            that waits for data raises (`Session.next`), which ends this process too.

        on_lost: called once another rank is lost, before the connections are closed: a process that was forked off here
            has them open too, so that the others would not notice.

    Raises:
        ExchangeError: a rank did not come, or died.
    """

    def __init__(self, rendezvous: Rendezvous, timeout: float, on_lost: Callable[[], None] = lambda: None) -> None:
        self._on_lost = on_lost
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.count = 0
        self.sent_bytes = 0
        limit = timedelta(seconds=timeout)
        try:
            self._store = dist.TCPStore(rendezvous.host, rendezvous.port, None, is_master=False, timeout=limit)
            self._store.set(f"here{self.rank}", "1")
            with without_greeting():
                self._group: Any = dist.ProcessGroupGloo(
                    dist.PrefixStore("odb", self._store), self.rank, self.world_size, limit
                )
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size} could not meet the others at {rendezvous.host}:"
                f"{rendezvous.port} within {timeout:g} s: {self._who_is_missing()}; check that all ranks started and "
                f"reach that address (GLOO_SOCKET_IFNAME picks the network interface): {_first_line(error)}"
            ) from error

    def _who_is_missing(self) -> str:
        no_answer = "rank 0's trainer, which serves the meeting, does not answer"
        if not hasattr(self, "_store"):
            return no_answer
        if self.world_size > MOST_ASKED:
            return "another rank did not come, or not in time"
        try:
            missing = [rank for rank in range(self.world_size) if not self._store.check([f"here{rank}"])]
        except RuntimeError:
            return no_answer
        if missing:
            return f"{names(missing)} did not come"
        return f"{other_rank(self.rank, self.world_size)} came, but the connection with it was not made"

    def minimum(self, values: Sequence[int], what: str) -> list[int]:
        return self._reduce(values, dist.ReduceOp.MIN, what)

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        return self._reduce(values, dist.ReduceOp.SUM, what)

    def _reduce(self, values: Sequence[int], op: dist.ReduceOp.RedOpType, what: str) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = NEVER
        with self._watched(what):
            self._group.allreduce([tensor], options).wait()
        self.count += 1
        self.sent_bytes += tensor.nbytes
        result: list[int] = tensor.tolist()
        return result

    def prefix_sum(self, value: int, what: str) -> tuple[int, int]:
        """Sums go up the tree of `tree_children`, offsets come down: at most 5 numbers sent, in any world."""
        children = tree_children(self.rank, self.world_size)
        with self._watched(what):
            below = [self._receive(child, 1)[0] for child in children]
            before, total = 0, value + sum(below)
            if self.rank:
                parent = (self.rank - 1) // 2
                self._send(parent, [total])
                before, total = self._receive(parent, 2)
            offset = before + value
            for child, part in zip(children, below, strict=True):
                self._send(child, [offset, total])
                offset += part
        return before, total

    def _send(self, rank: int, values: list[int]) -> None:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._group.send([tensor], rank, 0).wait(NEVER)
        self.sent_bytes += tensor.nbytes

    def _receive(self, rank: int, count: int) -> list[int]:
        tensor = torch.zeros(count, dtype=torch.int64)
        self._group.recv([tensor], rank, 0).wait(NEVER)
        result: list[int] = tensor.tolist()
        return result

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._on_lost()
            self._group = None  # closes the connections: a rank that is no neighbour of the dead one notices it now
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size} lost the others in {what}: {self._who_is_gone()}; look for the "
                f"first error among the ranks: {_first_line(error)}"
            ) from error

    def _who_is_gone(self) -> str:
        """Which ranks do not answer: each that lost the others says so in the store, the dead one cannot."""
        silent: list[int] = []

        def ask() -> None:
            end = time.monotonic() + ANSWER_SECONDS
            with contextlib.suppress(RuntimeError):
                self._store.set(f"lost{self.rank}", "1")
                waiting = [rank for rank in range(self.world_size) if rank != self.rank]
                while len(waiting) > 1 and time.monotonic() < end:  # one at least is gone
                    waiting = [rank for rank in waiting if not self._store.check([f"lost{rank}"])]
                    time.sleep(0.1)
                if self.rank == 0:  # the store ends with this rank's trainer, and others may still want to ask
                    time.sleep(0.5)
                silent.extend(waiting)

        if self.world_size <= MOST_ASKED:
            thread = threading.Thread(target=ask, daemon=True)  # the store may be gone, too, and its host not answer
            thread.start()
            thread.join(ANSWER_SECONDS + 1.0)
        if not silent:
            return f"{other_rank(self.rank, self.world_size)} ended"
        if len(silent) == 1:
            return f"rank {silent[0]} ended without a word"
        # one that computes or collates cannot answer before its next exchange
        return f"no answer from {names(silent)}, of which at least one ended"


def connect(rendezvous: Rendezvous | None, timeout: float, on_lost: Callable[[], None] = lambda: None) -> Exchange:
    """The exchange of this rank; `None` for a world of one. For `on_lost` see `GlooExchange`."""
    return LocalExchange() if rendezvous is None else GlooExchange(rendezvous, timeout, on_lost)


def try_gloo() -> object:
    """A Gloo group of this process alone, in which one reduction was made. To be kept: ending it may take a while.

    A process that was forked while a thread of its parent held a lock inside torch (such as that of the flight
    recorder, which each collective of each Gloo group takes) finds it locked for ever. Then it hangs in here, before
    any other rank counts on it, and not beyond the reach of every time-out in the middle of a meeting.

    Raises:
        ExchangeError: Gloo does not work on this machine.
    """
    try:
        with without_greeting():
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
