"""Messages through the socket between the trainer and its collate process: a pickle, and the buffers beside it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

from odb_factory.runtime.serialise import dumps, loads

_COUNT = struct.Struct("!I")
_SIZE = struct.Struct("!Q")

AT_ONCE = 256 * 2**10
"""Messages below this size are put together and sent in one piece (bytes)."""


def send(sock: socket.socket, obj: Any) -> None:
    """Send one message; blocks while the peer does not read. OSError when the peer is gone."""
    buffers: list[Any] = []
    head = dumps(obj, buffers.append)
    send_parts(sock, [head, *(buffer.raw() for buffer in buffers)])


def send_parts(sock: socket.socket, parts: Sequence[Any]) -> None:
    """Send one message that is serialised already."""
    parts = [memoryview(part) for part in parts]
    sizes = _COUNT.pack(len(parts)) + b"".join(_SIZE.pack(p.nbytes) for p in parts)
    if sum(p.nbytes for p in parts) < AT_ONCE:
        sock.sendall(b"".join((sizes, *parts)))
        return
    sock.sendall(sizes)
    for part in parts:
        sock.sendall(part)


def receive(sock: socket.socket) -> Any:
    """Receive one message; blocks. EOFError when the peer is gone."""
    (count,) = _COUNT.unpack(_read(sock, _COUNT.size))
    sizes = _read(sock, _SIZE.size * count)
    head, *buffers = (_read(sock, _SIZE.unpack_from(sizes, i * _SIZE.size)[0]) for i in range(count))
    return loads(head, buffers)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        got = sock.recv_into(view)
        if got == 0:
            raise EOFError("the peer closed the connection")
        view = view[got:]
    return data
