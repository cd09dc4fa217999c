"""What has been trained of an epoch: kept while a loader runs, saved with a checkpoint, restored in any world.

The state is *which* samples are done, not how far each rank got, so that another number of ranks, another budget, depth
or number of workers goes on with exactly the rest.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped
from odb_factory.runtime.errors import OdbError
from odb_factory.runtime.messages import Resumed, StepInfo, pack_flags, unpack_flags

VERSION = 1


class StateError(OdbError):
    """A state that does not fit this run, or cannot be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a state and a run must have in common."""

    size: int
    """Samples of the dataset."""
    data: str
    """Fingerprint of the dataset; empty where it has none."""
    seed: int
    shuffle: bool

    @classmethod
    def of(cls, dataset: Any, config: OdbConfig) -> Identity:
        """That of a run on `dataset`, with its `fingerprint()` where it has one."""
        fingerprint = getattr(dataset, "fingerprint", None)
        return cls(
            size=len(dataset),
            data=str(fingerprint()) if callable(fingerprint) else "",
            seed=config.seed,
            shuffle=config.shuffle,
        )


class EpochProgress:
    """The samples of one epoch that are done, as far as this rank knows; all ranks together know all of it.

    Args:
        size: samples of the dataset.
        epoch: the epoch.
        resumed: what was done of it before.
    """

    def __init__(self, size: int, epoch: int, resumed: Resumed | None = None) -> None:
        self.epoch = epoch
        self.resumed = resumed
        self._done = np.zeros(size, dtype=np.uint8)
        if resumed is not None:
            self._done[:] = unpack_flags(resumed.done, size)
        self._steps = resumed.steps if resumed else 0
        self._emitted = resumed.emitted if resumed else 0
        self._bad_here = 0

    def record(self, info: StepInfo) -> None:
        """A step was handed out: its samples, and those dropped before it, are done."""
        self._done[list(info.indices)] = 1
        self._drop(info.dropped)
        self._steps = info.step + 1
        self._emitted += info.global_samples

    def _drop(self, dropped: tuple[Dropped, ...]) -> None:
        self._done[[d.index for d in dropped]] = 1
        self._bad_here += sum(d.bad for d in dropped)

    def gather(self, world_size: int) -> Resumed:
        """What all ranks have done. Collective over the default process group where there are several.

        Raises:
            StateError: there are several ranks and no default process group.
        """
        bad = self._bad_here
        done = self._done
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise StateError("state_dict gathers from all ranks: call torch.distributed.init_process_group first.")
            device = _device_of_the_group()
            together = torch.from_numpy(done).to(device)
            dist.all_reduce(together, dist.ReduceOp.MAX)
            counted = torch.tensor([bad], dtype=torch.int64, device=device)
            dist.all_reduce(counted)
            done, bad = together.cpu().numpy(), int(counted)
        return Resumed(
            done=pack_flags(done),
            steps=self._steps,
            emitted=self._emitted,
            bad=bad + (self.resumed.bad if self.resumed else 0),
        )


def _device_of_the_group() -> torch.device:
    """Where tensors must lie for collectives of the default process group."""
    if "gloo" in dist.get_backend():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def pack_bits(flags: np.ndarray) -> str:
    """An array of flags as short text."""
    return _as_text(pack_flags(flags))


def unpack_bits(text: str, size: int) -> np.ndarray:
    """The inverse of `pack_bits`: (size,) booleans."""
    return unpack_flags(_from_text(text), size)


def pack_values(values: np.ndarray) -> str:
    """An array of small numbers (uint8) as short text."""
    return _as_text(values.astype(np.uint8).tobytes())


def unpack_values(text: str, size: int) -> np.ndarray:
    """The inverse of `pack_values`: (size,) uint8."""
    return np.frombuffer(_from_text(text), np.uint8, count=size)


def _as_text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _from_text(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


_KEYS = ("version", "epoch", "steps", "emitted", "bad", "done", "size", "data", "seed", "shuffle")


def pack(identity: Identity, epoch: int, resumed: Resumed) -> dict[str, Any]:
    """A state as plain values, fit for JSON."""
    done = {"steps": resumed.steps, "emitted": resumed.emitted, "bad": resumed.bad, "done": _as_text(resumed.done)}
    return {"version": VERSION, "epoch": epoch, **done, **dataclasses.asdict(identity)}


def unpack(state: Mapping[str, Any], identity: Identity) -> tuple[int, Resumed]:
    """The epoch to go on with, and what was done of it.

    Raises:
        StateError: the state is of another dataset, seed or order, or is no state.
    """
    missing = [key for key in _KEYS if key not in state]
    if missing or state["version"] != VERSION:
        what = f"it has no {missing[0]!r}" if missing else f"its version is {state['version']}, not {VERSION}"
        raise StateError(f"this is no state of an OdbDataLoader of this version of odb-factory: {what}.")
    for key, what, remedy in (
        ("size", "number of samples", "resume with the same data, or start anew"),
        ("seed", "seed", "set the seed (data_seed, seed) of the run that saved it, or start anew"),
        ("shuffle", "order (shuffled or not)", "set it as in the run that saved it, or start anew"),
        ("data", "dataset", "resume with the same data in the same order, or start anew"),
    ):
        here = getattr(identity, key)
        if state[key] != here and not (key == "data" and not (here and state[key])):
            raise StateError(
                f"the saved state is of a run with another {what} ({state[key]!r}, here {here!r}), so it does not say "
                f"which samples are done; {remedy}."
            )
    try:
        done = _from_text(state["done"])
    except (TypeError, ValueError, zlib.error) as error:
        raise StateError(f"the saved state is damaged ({error}); resume from another one.") from None
    return state["epoch"], Resumed(done=done, steps=state["steps"], emitted=state["emitted"], bad=state["bad"])
