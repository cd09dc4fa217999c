"""The record of all ranks together: what needs collectives over the trainer's process group."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import EpochEnd, StepInfo
from odb_factory.trainer.ledger import MOST_NAMED, NOW, Ledger
from odb_factory.trainer.picture import REPORT_NAME, RunPicture, draw, table_of
from odb_factory.trainer.report import SUMMARY_NAME, Audit, write_summary
from odb_factory.trainer.series import Lengths, Series
from odb_factory.trainer.telemetry import Meter, make_reduce

logger = logging.get_logger("transformers.odb_factory")

MUCH_PADDING = 0.3
"""Share of padding above which the end of a run says what to do about it."""


class RunRecord:
    """What becomes of the ledger: it is closed, saved and summed with what the other ranks know, and written down.

    Every rank calls the same methods.

    Args:
        ledger: of the run; of one that is resumed, as it was restored.
        directory: the output directory.
        device: where tensors must lie for collectives.
        write_steps: write the audit.
        saved: the state that the run goes on from, see `state`; None: it begins anew.
    """

    def __init__(
        self,
        ledger: Ledger,
        directory: str | os.PathLike[str],
        *,
        device: torch.device,
        write_steps: bool,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.ledger = ledger
        self.audit = Audit(
            directory,
            rank=ledger.rank,
            world_size=ledger.world_size,
            write_steps=write_steps,
            keep_updates=ledger.updates,
        )
        self.meter = Meter(ledger, make_reduce(ledger.world_size, device))
        self.before: Mapping[str, int] = Counter(ledger.counts)
        """Counts of the run before this process began, over all ranks."""
        self._lengths = Lengths()
        self._series = Series()
        self._device = device
        self._open = False
        if saved is not None:
            self._open = saved["audit"]["open"]
            self.meter.restore(saved["audit"].get("meter"))

    def open_epoch(self) -> None:
        """An epoch begins, or goes on after a resumption."""
        self.ledger.open_epoch()
        self._open = True

    def add_update(self, infos: Sequence[StepInfo]) -> None:
        """An update is done that was made of these steps."""
        self.ledger.add(infos)
        self.meter.end_update(infos)
        seconds, wait = self.meter.last_seconds / max(1, len(infos)), self.meter.last_wait / max(1, len(infos))
        for info in infos:
            self.audit.write(info, self.ledger.updates)
            self._lengths.add(info.lengths)
            self._series.add(1, info.global_samples, info.global_tokens, info.global_padded_tokens, seconds, wait)

    def close_epoch(self, end: EpochEnd | None) -> None:
        """The epoch is over; `end` is what the loader said then, None where `max_steps` ended it. Closes it once."""
        if not self._open:
            return
        self._open = False
        ledger, left = self.ledger, 0
        if end is not None:
            ledger.add_dropped(end.dropped)
            ledger.local["short_windows"] += end.short_windows
            left = end.left
        trained = self._trained()
        if left:
            dropped = {d.index for d in self._gathered()[1]}
            ledger.left = [int(i) for i in np.flatnonzero(trained != NOW) if i not in dropped][:MOST_NAMED]
        ledger.counts["left"] += left
        ledger.close_epoch(trained)

    def state(self) -> dict[str, Any]:
        """What a run needs to go on from here, fit for JSON: `Ledger.restore` and the record take it."""
        state = self.ledger.state(self._trained(), *self._gathered())
        state["audit"].update(open=self._open, meter=self.meter.state())
        return state

    def finish(self, known: Mapping[str, Any], write: bool) -> dict[str, Any]:
        """The summary of the run, with what is `known` of it; the ranks that `write` write it and draw the picture."""
        self.close_epoch(None)  # one that was resumed, with nothing left to do
        self.meter.figures()
        figures = {name: round(value, 6) for name, value in self.meter.figures_of_run().items() if name != "padding"}
        seconds = round(self.meter.run.get("seconds", 0.0), 3)
        counted = self.ledger.summary(*self._gathered())
        summary = {**known, **counted, "training_seconds": seconds, **figures}
        lengths = self._reduced(self._lengths.counts, dist.ReduceOp.SUM)
        if write:
            with _may_fail(SUMMARY_NAME):
                write_summary(self.audit.directory, summary)
            with _may_fail(REPORT_NAME):
                self._draw(self.audit.directory / REPORT_NAME, summary, lengths)
        return summary

    def _draw(self, path: Path, summary: dict[str, Any], lengths: np.ndarray) -> None:
        if not len(steps := self._series.rows()):
            return
        ranks = self.ledger.world_size
        title = (
            f"{summary['samples']:,} samples, {ranks} rank{'s' * (ranks > 1)}, budget "
            f"{summary['token_budget']:,} tokens, depth {summary['depth']:,}"
        )
        if steps[:, 0].sum() < summary["steps"]:
            title += "; drawn since the run was resumed"
        drawn = RunPicture(
            title=title,
            lengths=lengths,
            steps=steps,
            before=self.before["samples"],
            token_budget=summary["token_budget"],
            world_size=ranks,
            table=table_of(summary),
        )
        draw(path, drawn)

    def _trained(self) -> np.ndarray:
        """`Ledger.trained` of all ranks together: the latest of each sample."""
        return self._reduced(self.ledger.trained, dist.ReduceOp.MAX)

    def _reduced(self, values: np.ndarray, how: Any) -> np.ndarray:
        tensor = torch.from_numpy(values.copy()).to(self._device)
        if self.ledger.world_size > 1:
            dist.all_reduce(tensor, how)
        reduced: np.ndarray = tensor.cpu().numpy()
        return reduced

    def _gathered(self) -> tuple[dict[str, int], list[Dropped]]:
        """The counts of single ranks, summed, and what they dropped: the first ones of each, in all `MOST_NAMED`."""
        local: Counter[str] = Counter()
        mine = (dict(self.ledger.local), list(self.ledger.dropped.values()))
        of_all: list[Any] = [mine]
        if self.ledger.world_size > 1:
            of_all *= self.ledger.world_size
            dist.all_gather_object(of_all, mine)
        for counts, _ in of_all:
            local.update(counts)
        return dict(local), [d for _, dropped in of_all for d in dropped]


@contextlib.contextmanager
def _may_fail(name: str) -> Iterator[None]:
    """A run that is done must not end without its model, whatever keeps this file from being written."""
    try:
        yield
    except Exception as error:
        logger.warning(f"Online Dynamic Batching: no {name} ({type(error).__name__}: {error}).")


def in_words(summary: Mapping[str, Any], directory: Path) -> str:
    """The end of a run for its log: the figures that a reader wants first, and where the others are."""
    rows = table_of(summary)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(
        ["Online Dynamic Batching, all ranks:", *lines, f"  more in {directory}: {SUMMARY_NAME}, {REPORT_NAME}"]
    )


def announcement(
    config: OdbConfig, *, ranks: int, window_bytes: int | None, micro_batches: int, samples: int | None
) -> str:
    """The beginning of a run for its log: what steps, windows and updates are made of.

    Args:
        config: of the run.
        ranks: their number.
        window_bytes: most bytes of a rank's window; None: no bound.
        micro_batches, samples: see `closes_update`.
    """
    size = f" or {window_bytes >> 20:,} MiB (odb_window_bytes)" if window_bytes is not None else ""
    first = ", ".join(f"{config.window_target(number):,}" for number in range(3))
    ramp = f" (an epoch begins with {first})" if config.ramp else ""
    if samples is not None:
        update = f"{samples:,} sample{'s' * (samples > 1)}, and what the step has that completes them"
    else:
        update = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} a rank"
    attention = ""
    if config.attention_length is not None:
        attention = f"; attention counts as much as all else in rows of {config.attention_length:,} tokens"
    return (
        f"Online Dynamic Batching: up to {config.token_budget:,} padded tokens a micro-batch, windows of "
        f"{config.depth:,} sample{'s' * (config.depth > 1)}{size} a rank{ramp}; rule {config.alignment}, "
        f"assignment {config.assignment}{attention}; {ranks} rank{'s' * (ranks > 1)}; an update is {update}."
    )


def resumption(ledger: Ledger, epoch: int, *, over: bool) -> str:
    """Where a run goes on that is resumed, for its log.

    Args:
        ledger: as it was saved.
        epoch: the epoch to go on with (0-based).
        over: nothing is left to do.
    """
    done, size = ledger.in_epoch, ledger.dataset_size
    if over:
        text = "the run was over at this checkpoint; nothing is left to train on."
    elif not done:
        text = f"the run goes on at the beginning of epoch {epoch + 1}."
    elif done == 1:
        text = f"1 of {size:,} samples of epoch {epoch + 1} is done; it is left out without being read."
    else:
        text = f"{done:,} of {size:,} samples of epoch {epoch + 1} are done; they are left out without being read."
    return f"Online Dynamic Batching: {text}"


def known_of(
    config: OdbConfig,
    ledger: Ledger,
    *,
    ranks: int,
    samples: int | None,
    auto: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `RunRecord.finish` needs to be told of a run.

    Args:
        config: of the run.
        ledger: at its end.
        ranks: their number.
        samples: see `closes_update`.
        auto: how the token budget was found; None: it was given.
    """
    return {
        "epochs": round(ledger.epoch, 6),
        "token_budget": config.token_budget,
        "token_budget_auto": auto,
        "depth": config.depth,
        "attention_length": config.attention_length,
        "world_size": ranks,
        "dataset_size": ledger.dataset_size,
        "odb_samples_per_update": samples,
        "updates": ledger.updates,
    }


def advice(summary: Mapping[str, Any], config: OdbConfig, loader: OdbDataLoader | None) -> list[str]:
    """What a run that is done should be told: one sentence each, with the remedy.

    Args:
        summary: of the run.
        config: of the run.
        loader: of the run.
    """
    deeper = " or raise odb_depth" if config.depth * summary["world_size"] < summary["dataset_size"] else ""
    wanted, per_step = summary["odb_samples_per_update"], summary["samples_per_step"]
    window_bytes = (loader.window_bytes if loader is not None else None) or 0
    found = (
        (
            summary["short_windows"] > 0,
            f"odb_window_bytes ({window_bytes / 2**20:,.1f} MiB) kept {summary['short_windows']:,} of "
            f"{summary['rounds'] * summary['world_size']:,} windows below odb_depth, which costs padding; raise it if "
            "the host has the memory.",
        ),
        (
            wanted is not None and per_step > wanted,
            f"odb_samples_per_update {wanted} had no effect: a step of all ranks has {per_step:.1f} samples already; "
            "lower odb_token_budget, or set odb_max_samples (of a rank's micro-batch).",
        ),
        (
            summary["padding"] > MUCH_PADDING,
            f"{summary['padding']:.0%} of the padded tokens were padding: the windows hold too few samples for steps "
            f"of {config.token_budget:,} tokens; lower odb_token_budget{deeper} (`odb-factory plan` compares them).",
        ),
    )
    return [sentence for applies, sentence in found if applies]
