"""Keeps Gloo's greeting out of a run's output: each group that is built prints a line about nothing but its success."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

_STDOUT = 1

_GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected to [^\n]*\n?")


@contextlib.contextmanager
def without_greeting() -> Iterator[None]:
    """What this process writes to its standard output meanwhile appears afterwards, without Gloo's greeting.

    C++ writes it, past `sys.stdout`, so the descriptor itself is turned aside: not for processes with other threads
    that write much. Standard error is left alone. Where there is no place for a temporary file, the greeting appears.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            stdout = os.dup(_STDOUT)
        except OSError:  # no space, no descriptor, or no standard output
            yield
            return
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            file.seek(0)
            _write(_GREETING.sub(b"", file.read()))


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a reader that is gone is no reason to fail
        while text:
            text = text[os.write(_STDOUT, text) :]
