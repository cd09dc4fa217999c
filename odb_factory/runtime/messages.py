"""What the trainer process and the collate process tell each other, but for the batches themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.runtime.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What is known of one step: exact, and the same `global_*` figures on every rank (G7)."""

    epoch: int
    step: int
    """Index within the epoch, the same on every rank."""
    round: int
    """Round of the epoch in which the step was aligned."""
    idle: bool
    """An IDLE slot of this rank: the batch is a filler of weight zero, or None with `idle: skip`."""
    last: bool
    """The last step of the epoch, on every rank."""
    indices: tuple[int, ...]
    """Dataset indices of this rank's samples, in the order of the batch; empty if IDLE."""
    lengths: tuple[int, ...]
    """Their observed lengths (tokens)."""
    loss_tokens: int
    """Supervised targets of this rank."""
    tokens: int
    """Real tokens of this rank."""
    padded_tokens: int
    """Padded tokens of this rank; 0 if IDLE."""
    work: int
    """`padded_work` of this rank (tokens); 0 if IDLE."""
    global_samples: int
    global_loss_tokens: int
    global_tokens: int
    global_padded_tokens: int
    global_work: int
    global_dropped: int
    """Samples dropped on all ranks since the step before."""
    dropped: tuple[Dropped, ...] = ()
    """Samples dropped on this rank since the step before."""
    window_samples: int = 0
    """Samples in this rank's window when the round began."""
    window_bytes: int = 0
    """Bytes that they took."""
    align_seconds: float = field(default=0.0, compare=False)
    """Time of the round's exchanges on this rank, with the wait for the others (seconds)."""

    @property
    def samples(self) -> int:
        """Samples that this rank emits in this step."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The last message of an epoch."""

    epoch: int
    steps: int
    rounds: int
    left: int
    """Samples of the epoch that no rank emitted or dropped (non-join mode); the same on every rank."""
    dropped: tuple[Dropped, ...]
    """Samples dropped on this rank after the last step."""
    global_dropped: int
    """Samples dropped on all ranks after the last step."""
    exchanges: int
    """Reductions in this epoch."""
    exchange_bytes: int
    """Bytes that this rank put into them, and into prefix sums."""
    short_windows: int = 0
    """Rounds whose window `window_bytes` kept below its number of samples, on this rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the collate process, on its way to the trainer."""

    kind: str
    """`sample`, `exchange` or `collate`."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """What the collate process is about to do; for the text of time-out errors."""

    name: str
    for_others: bool = False
    """It may have to wait for other ranks in it."""


def pack_flags(flags: np.ndarray) -> bytes:
    """An array of flags, one bit each."""
    return np.packbits(flags.astype(bool)).tobytes()


def unpack_flags(data: bytes, size: int) -> np.ndarray:
    """The inverse of `pack_flags`: (size,) booleans."""
    return np.unpackbits(np.frombuffer(data, np.uint8), count=size).astype(bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was done of an epoch before; the same on every rank."""

    done: bytes
    """For each index of the dataset, as `pack_flags` packs them: emitted or dropped."""
    steps: int
    emitted: int
    """Samples, on all ranks."""
    bad: int
    """Samples skipped as bad, on all ranks."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Command to the collate process of a rank among several: meet the others there."""

    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """Command to the collate process."""

    epoch: int
    resumed: Resumed | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to the collate process."""
