"""Reading and observing one sample."""

from __future__ import annotations

import contextlib
import errno
import random
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.core.sample import BadSample, Dropped, DropSample, SampleMeta
from odb_factory.runtime.errors import SampleError
from odb_factory.runtime.observe import Observe
from odb_factory.runtime.packing import Packed, pack

Key = tuple[int, int]
"""Epoch and index of a sample."""


@dataclass(frozen=True, slots=True)
class Held:
    """An observed sample in private memory: what is known of it, and its pickled content."""

    meta: SampleMeta
    payload: Packed


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample that raised; travels as a value so that the worker lives on and nothing of the error is lost."""

    index: int
    message: str
    traceback: str


class ObservedDataset(Dataset[Held | Dropped | Failed]):
    """Runs in the workers: reads one sample, observes it, applies the policies, and packs it into bytes.

    A key is (epoch, index). Each sample has random numbers of its own that depend on these and the seed only: not on
    the worker that reads it, so that the number of workers, the timing and a resumption change nothing.
    """

    def __init__(self, dataset: Any, observe: Observe, config: OdbConfig) -> None:
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Where samples are read in a thread of the collate process: for that data set, and for random numbers."""
        self.restore = True
        """Others in this process draw random numbers too."""
        self.seed = config.seed
        self.dataset = dataset
        self.observe = observe
        self.overlong = config.overlong
        self.skip_bad = config.on_bad_sample == "skip"
        self.budget = make_budget(config)

    def __getitem__(self, key: Key) -> Held | Dropped | Failed:
        item = self.read(key)
        return Held(item.meta, item.payload.copy()) if isinstance(item, Held) else item

    def read(self, key: Key) -> Held | Dropped | Failed:
        """As `[key]`, but a sample's large tensors may lie where the data set made them."""
        epoch, index = key
        with self.lock, seeded(f"{self.seed}:{epoch}:{index}", restore=self.restore):
            return self._read(index)

    def _read(self, index: int) -> Held | Dropped | Failed:
        try:
            sample = self.dataset[index]
            meta = self.observe(index, sample)
            self._check_length(meta)
            payload = pack(sample)
            return Held(replace(meta, index=index, nbytes=payload.nbytes), payload)
        except DropSample as drop:
            return Dropped(index, str(drop.reason), str(drop.detail))
        except SampleError as error:
            return Failed(index, str(error), "")
        except Exception as error:
            if self.skip_bad and not is_of_the_machine(error):
                reason = error.reason if isinstance(error, BadSample) else "unreadable"
                detail = error.detail if isinstance(error, BadSample) else describe_error(error)
                return Dropped(index, reason, self._describe(index) + detail, bad=True)
            message = f"sample {index} could not be read: {self._describe(index)}{describe_error(error)}"
            return Failed(index, message, traceback.format_exc())

    def _describe(self, index: int) -> str:
        """The data set's own words for a sample, where it has any (`describe_sample`)."""
        describe = getattr(self.dataset, "describe_sample", None)
        if describe is None:
            return ""
        try:
            return f"{describe(index)}: "
        except Exception:  # of a sample that is bad already
            return ""

    def _check_length(self, meta: SampleMeta) -> None:
        if self.overlong == "keep" or not self.budget.overlong(meta):
            return
        detail = f"{meta.length} tokens, budget {self.budget.tokens}"
        if self.overlong == "drop":
            raise DropSample("overlong", detail)
        raise SampleError(
            f"sample {meta.index} is longer than the token budget ({detail}); raise the budget, shorten the samples "
            "(cutoff_len), or set overlong (odb_overlong) to keep or drop."
        )


@contextlib.contextmanager
def seeded(name: str, *, restore: bool = True) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators are seeded by `name`.

    Args:
        restore: afterwards they go on as before. That takes ten times as long.
    """
    generator = torch.default_generator  # torch.manual_seed would look for accelerators each time
    states = (random.getstate(), np.random.get_state(), generator.get_state()) if restore else None
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            generator.set_state(states[2])


def describe_error(error: BaseException) -> str:
    """Its text, with the name of its class where that says something."""
    return str(error) if isinstance(error, BadSample) else f"{type(error).__name__}: {error}"


_MACHINE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine ran out of something, so that no sample is to blame."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # so says torch
        return True
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRORS)
