"""Errors of the runtime. Each message is one sentence on what is wrong and where, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from odb_factory.core.sample import BadSample, Dropped

EXAMPLES = 3
"""Samples that an error names."""


class OdbError(RuntimeError):
    """Base of all errors raised while a loader runs."""


class SampleError(OdbError):
    """A sample could not be read or observed; the message holds index, cause and the worker's traceback.

    Or too many were bad, or all were dropped.
    """


class CollateError(OdbError):
    """The collate process failed or died."""


class ExchangeError(OdbError):
    """The exchange with the other ranks failed: one of them died, stalled or was started differently."""


def other_rank(rank: int, world_size: int) -> str:
    """A rank other than `rank`, as an error names it that does not know which: of two ranks, there is only one."""
    return f"rank {1 - rank}" if world_size == 2 else "another rank"


def names(ranks: Sequence[int]) -> str:
    """These ranks, for an error; empty if there are none."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def reasons(dropped: Iterable[Dropped]) -> str:
    """These samples and why they were dropped, for an error."""
    return "; ".join(f"sample {d.index} ({d.reason})" + (f": {d.detail}" if d.detail else "") for d in dropped)


def all_dropped(rank: int, world_size: int, here: Sequence[Dropped], number: int) -> SampleError:
    """The error of an epoch without a step.

    Args:
        rank, world_size: of this process.
        here: the samples that this rank dropped.
        number: how many all ranks dropped.
    """
    what = f"all {number:,} samples of this epoch were" if number > 1 else "the only sample of this epoch was"
    if here:
        which = f"the first {'on this rank' if world_size > 1 else 'ones'}: {reasons(here[:EXAMPLES])}"
    else:
        which = f"none of them on this rank, so see the error of {other_rank(rank, world_size)}"
    return SampleError(
        f"rank {rank}: {what} dropped, so there is nothing to train on; fix the data, or raise the token budget "
        f"(odb_token_budget) if they are overlong ({which})."
    )


def describe_error(error: BaseException) -> str:
    """Its text, with the name of its class where that says something."""
    return str(error) if isinstance(error, BadSample) else f"{type(error).__name__}: {error}"


_MACHINE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine ran out of something, so that no sample is to blame."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # so says torch
        return True
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRORS)
