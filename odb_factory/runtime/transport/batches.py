"""Batches from the collate process to the trainer.

In: a batch in the collate process. Out: the same batch in memory that is the trainer's alone.

Small ones go through the socket. Of larger ones only references do: to tensors that were made in shared memory, which
the trainer takes over as they are, and to others, which it copies out of the memory of the collate process. Where that
is forbidden the batch goes through the socket, which costs a second copy.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from odb_factory.runtime.allocation import HUGE_PAGE, ReusedBlocks
from odb_factory.runtime.errors import CollateError
from odb_factory.runtime.messages import Stop
from odb_factory.runtime.serialise import Serialised, loads, serialise
from odb_factory.runtime.transport.connection import receive, send, send_parts
from odb_factory.runtime.transport.process_memory import ProcessGoneError, ReadForbiddenError, Span, read, spans_of
from odb_factory.runtime.transport.shared_memory import JoinInSlot, SharedSlots

LARGE_BATCH = 2 * HUGE_PAGE
"""After the first batch of this size (bytes), batches are made in shared memory."""

Places = tuple[Span | None, ...]
"""For each buffer of a batch, its offset in the slot and its size; None: it lies in private memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch of which the receiver must take over or copy the buffers, and answer with `Received`."""

    head: bytes
    private: tuple[Span, ...]
    """Buffers in the sender's private memory."""
    places: Places
    slot: int


@dataclass(frozen=True, slots=True)
class Received:
    """The answer to `Offer`."""

    done: bool
    """False: reading the sender's memory is forbidden; send it all."""


class StopRequested(BaseException):
    """The trainer wants no more."""


class BatchSender:
    """The collate process's side; serves all epochs.

    Args:
        sock: the connection with the trainer.
        slots: memory that is shared with it, if there is any.
    """

    def __init__(self, sock: socket.socket, slots: SharedSlots | None) -> None:
        self._sock = sock
        self._slots = slots
        self._readable = True
        self._large = False

    def send(self, make: Callable[[], Any]) -> None:
        """Hand over what `make` returns; returns when the receiver does not need its private memory any more.

        Raises:
            OSError, EOFError: the trainer is gone.
            StopRequested: the trainer does not want it.
        """
        content, places, slot = self._make(make)
        if self._slots is not None and self._slots.is_reserved(slot):  # the collate function has kept a part of it
            places = (None,) * len(places)
        private = [buffer for buffer, place in zip(content.buffers, places, strict=True) if place is None]
        if not content.buffers or (private and not self._readable):
            send_parts(self._sock, content.parts)
            return
        if self._slots is not None and any(places):
            self._slots.hand_over(slot)
        send(self._sock, Offer(content.head, tuple(spans_of(private)), places, slot))
        answer = receive(self._sock)
        if isinstance(answer, Stop):
            raise StopRequested
        if not isinstance(answer, Received):
            raise CollateError(f"unknown answer {answer!r}")
        if not answer.done:
            self._readable = False
            send_parts(self._sock, content.parts)

    def _make(self, make: Callable[[], Any]) -> tuple[Serialised, Places, int]:
        """A batch, where its buffers lie in shared memory, and in which slot; refers to none of its tensors there."""
        if self._slots is None or not self._large:
            content = serialise(make())
            self._large = content.nbytes >= LARGE_BATCH
            return content, (None,) * len(content.buffers), -1
        with JoinInSlot(self._slots) as join:
            content = serialise(make())
        places = join.places_of(spans_of(content.buffers))
        if not any(places) or _overlap(places):
            return content, (None,) * len(places), -1
        room = self._slots.memory(join.slot)
        buffers = (
            buffer if place is None else room[place[0] : sum(place)]
            for buffer, place in zip(content.buffers, places, strict=True)
        )
        return Serialised(content.head, tuple(buffers)), places, join.slot


def _overlap(places: Places) -> bool:
    """Whether tensors of a batch share memory, as they must not in the trainer."""
    there = sorted(place for place in places if place is not None)
    return any(first[0] + first[1] > second[0] for first, second in pairwise(there))


def accept(offer: Offer, pid: int, memory: ReusedBlocks, slots: SharedSlots | None) -> tuple[Received, Any]:
    """The trainer's side: the answer to `offer`, and what was offered (None where it could not be copied).

    Args:
        pid: the collate process.
        memory: where copies are put; it has their memory back when the last tensor in it is gone.
        slots: the memory that is shared with the collate process.

    Raises:
        EOFError: the collate process is gone.
    """
    room = slots.take_over(offer.slot) if slots is not None and any(offer.places) else memoryview(b"")
    try:
        copies = iter(read(pid, offer.private, memory.allocate))
    except ReadForbiddenError:
        return Received(False), None
    except ProcessGoneError as error:
        raise EOFError from error
    buffers = [next(copies) if place is None else room[place[0] : sum(place)] for place in offer.places]
    return Received(True), loads(offer.head, buffers)
