"""The batching strategy `odb`: the four methods of v1's registry, over the micro-batches of an `OdbDataLoader`.

Which samples make a micro-batch, and how many there are on each rank, was settled before, by the loader's collate
process: what v1 calls samples are here micro-batches that are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from odb_factory.llamafactory.v1.arguments import STRATEGY
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import IGNORE_INDEX
from odb_factory.trainer.updates import closes_update

KEY = "odb_update"
"""Where v1's `batch_info` holds the `UpdateInMaking`."""


@dataclass
class UpdateInMaking:
    """What an update is made of, and what it has so far."""

    micro_batches: int
    samples: int | None
    """See `closes_update`."""
    infos: list[StepInfo] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """No micro-batch more belongs to it."""
        return closes_update(self.infos, self.micro_batches, self.samples)

    def take(self) -> list[StepInfo]:
        """The steps of an update that is handed out; the next one begins."""
        infos, self.infos = self.infos, []
        return infos


class MicroBatchProvider:
    """In place of v1's stateful data loader: hands out this rank's micro-batches, each as a list of one.

    Args:
        loader: forms them.
        update: learns what was handed out.
    """

    def __init__(self, loader: OdbDataLoader, update: UpdateInMaking) -> None:
        self.loader = loader
        self._update = update

    def __len__(self) -> int:
        """Samples of the dataset."""
        return len(self.loader.dataset)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for batch, info in self.loader:
            self._update.infos.append(info)
            yield [without_weight(batch) if info.idle else batch]


def without_weight(batch: dict[str, Any]) -> dict[str, Any]:
    """A filler: v1 weighs a micro-batch by its labels, so it has none."""
    return {
        **batch,
        "labels": torch.full_like(batch["labels"], IGNORE_INDEX),
        "loss_weights": torch.zeros_like(batch["loss_weights"]),
    }


class OdbBatching:
    """See the module; v1 calls these through its registry."""

    @staticmethod
    def get_data_provider_batch_size(batch_info: Any) -> int:
        """Micro-batches that the provider hands out at a time."""
        _update_of(batch_info)
        return 1

    @staticmethod
    def compute_length(data_provider: Any, batch_info: Any) -> int:
        """Updates of an epoch, as long as nothing is known: those of fixed batches."""
        update = _update_of(batch_info)
        fixed = batch_info["micro_batch_size"] * batch_info["num_micro_batch"] * data_provider.loader.world_size
        return -(-len(data_provider) // (update.samples or fixed))

    @staticmethod
    def fill_buffer(buffer: Any, batch_info: Any, next_samples: Callable[[bool], list[Any] | None]) -> None:
        """Take micro-batches from the provider until they make an update, or the epoch is over."""
        update = _update_of(batch_info)
        while not update.complete:
            micro_batch = next_samples(False)
            if micro_batch is None:
                break
            buffer.put(micro_batch)

    @staticmethod
    def generate_batch(buffer: Any, batch_info: Any) -> list[Any] | None:
        """The micro-batches of one update; None: the epoch is over."""
        _update_of(batch_info)
        return buffer.get(len(buffer)) or None


def _update_of(batch_info: Any) -> UpdateInMaking:
    update = batch_info.get(KEY)
    if not isinstance(update, UpdateInMaking):
        raise ValueError(
            f"batching_strategy: {STRATEGY} works with `llamafactory-cli sft` only; choose another strategy for this "
            "trainer."
        )
    return update
