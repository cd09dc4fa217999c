"""The progress bar of a run, in samples: what is known from the start, unlike the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback

from odb_factory.core.stats import padding_share
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.telemetry import PREFIX


class SamplesBar(ProgressCallback):
    """In place of `ProgressCallback`: samples done, with rate and remaining time, padding and samples per step.

    Args:
        progress: returns the run's progress.
        totals: returns its counts so far (`steps`, `samples`, `tokens`, `padded_tokens`), of all ranks.
        max_str_len: see `ProgressCallback`.
    """

    def __init__(
        self,
        progress: Callable[[], SampleProgress],
        totals: Callable[[], Mapping[str, int]],
        max_str_len: int = 100,
    ) -> None:
        super().__init__(max_str_len)
        self._progress = progress
        self._totals = totals

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            progress = self._progress()
            total = progress.estimated_samples(args.max_steps)
            self.training_bar = tqdm(
                total=total, initial=min(progress.handled, total), unit=" samples", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training_bar is not None:
            self._show(self._progress().estimated_samples(args.max_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self._show(self._progress().handled)
            self.training_bar.refresh()
        super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith(PREFIX)}
        super().on_log(args, state, control, logs=shown, **kwargs)

    def _show(self, total: int) -> None:
        totals = self._totals()
        bar: Any = self.training_bar
        bar.total = total
        if totals.get("steps"):
            padding = padding_share(totals["tokens"], totals["padded_tokens"])
            each = totals["samples"] / totals["steps"]
            bar.set_postfix_str(f"{each:.1f} samples/step, {padding:.1%} padding", refresh=False)
        bar.update(min(self._progress().handled, total) - bar.n)
