"""How batches get from the collate process to the trainer process.

Small ones go through the socket. Of larger ones the trainer process fetches the tensors itself, straight out of the
memory of the collate process: one copy, and nothing in shared memory. Where that is forbidden all goes through the
socket, which costs a second copy.
"""

from __future__ import annotations

import socket
from typing import Any

from odb_factory.runtime.blocks import Pool
from odb_factory.runtime.errors import CollateError
from odb_factory.runtime.messages import Fetched, Lent, Stop, receive, send, send_parts
from odb_factory.runtime.packing import loads, pack
from odb_factory.runtime.remote import Forbidden, Gone, fetch, spans_of


class Leave(BaseException):
    """The trainer wants no more."""


class Sender:
    """The collate process's side; serves all epochs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lends = True

    def send(self, obj: Any) -> None:
        """Hand over `obj`; returns when the peer does not need its memory any more.

        Raises:
            OSError, EOFError: the peer is gone.
            Leave: the peer does not want it.
        """
        packed = pack(obj)
        if not packed.buffers or not self._lends:
            send_parts(self._sock, packed.parts)
            return
        send(self._sock, Lent(packed.head, tuple(spans_of(packed.buffers))))
        answer = receive(self._sock)
        if isinstance(answer, Stop):
            raise Leave
        if not isinstance(answer, Fetched):
            raise CollateError(f"unknown answer {answer!r}")
        if not answer.done:
            self._lends = False
            send_parts(self._sock, packed.parts)


def accept(lent: Lent, pid: int, pool: Pool) -> tuple[Fetched, Any]:
    """The trainer's side: the answer to `lent`, and what was lent (None where it could not be fetched).

    Args:
        pid: the collate process.
        pool: where the tensors are put; it has their memory back when the last of them is gone.

    Raises:
        EOFError: the collate process is gone.
    """
    try:
        buffers = fetch(pid, lent.spans, pool.allocate)
    except Forbidden:
        return Fetched(False), None
    except Gone as error:
        raise EOFError from error
    return Fetched(True), loads(lent.head, buffers)
