"""Batches from the collate process to the trainer.

In: a batch in the collate process. Out: the same batch in private memory of the trainer process.

Small ones go through the socket. Of larger ones the trainer copies the tensors out of the memory of the collate
process. Where that is forbidden all goes through the socket, which costs a second copy.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from odb_factory.runtime.allocation import ReusedBlocks
from odb_factory.runtime.errors import CollateError
from odb_factory.runtime.messages import Stop
from odb_factory.runtime.serialise import serialise
from odb_factory.runtime.transport.connection import receive, send, send_parts
from odb_factory.runtime.transport.process_memory import (
    ProcessGoneError,
    ReadForbiddenError,
    Reference,
    copy_from,
    refer_to,
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch that the receiver must copy out of the sender's memory, and answer with `Copied`."""

    content: Reference


@dataclass(frozen=True, slots=True)
class Copied:
    """The answer to `Offer`."""

    done: bool
    """False: reading that memory is forbidden; send it all."""


class StopRequested(BaseException):
    """The trainer wants no more."""


class BatchSender:
    """The collate process's side; serves all epochs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._readable = True

    def send(self, obj: Any) -> None:
        """Hand over `obj`; returns when the receiver does not need its memory any more.

        Raises:
            OSError, EOFError: the trainer is gone.
            StopRequested: the trainer does not want it.
        """
        serialised = serialise(obj)
        if not serialised.buffers or not self._readable:
            send_parts(self._sock, serialised.parts)
            return
        send(self._sock, Offer(refer_to(serialised)))
        answer = receive(self._sock)
        if isinstance(answer, Stop):
            raise StopRequested
        if not isinstance(answer, Copied):
            raise CollateError(f"unknown answer {answer!r}")
        if not answer.done:
            self._readable = False
            send_parts(self._sock, serialised.parts)


def accept(offer: Offer, pid: int, memory: ReusedBlocks) -> tuple[Copied, Any]:
    """The trainer's side: the answer to `offer`, and what was offered (None where it could not be copied).

    Args:
        pid: the collate process.
        memory: where the tensors are put; it has their memory back when the last of them is gone.

    Raises:
        EOFError: the collate process is gone.
    """
    try:
        (content,) = copy_from(pid, [offer.content], memory.allocate)
    except ReadForbiddenError:
        return Copied(False), None
    except ProcessGoneError as error:
        raise EOFError from error
    return Copied(True), content.load()
