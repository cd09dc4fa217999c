"""The progress bar of a run, in samples: what is known from the start, unlike the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback

from odb_factory.core.stats import padding_share
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.telemetry import PREFIX


class SamplesBar(ProgressCallback):
    """In place of `ProgressCallback`: samples done, with rate and remaining time, padding and samples per step.

    Args:
        ledger: returns the run's ledger.
        max_str_len: see `ProgressCallback`.
    """

    def __init__(self, ledger: Callable[[], Ledger], max_str_len: int = 100) -> None:
        super().__init__(max_str_len)
        self._ledger = ledger

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            ledger = self._ledger()
            total = ledger.estimated_samples(args.max_steps)
            self.training_bar = tqdm(
                total=total, initial=min(ledger.handled, total), unit=" samples", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training_bar is not None:
            self._show(self._ledger().estimated_samples(args.max_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self._show(self._ledger().handled)
            self.training_bar.refresh()
        super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith(PREFIX)}
        super().on_log(args, state, control, logs=shown, **kwargs)

    def _show(self, total: int) -> None:
        counts = self._ledger().counts
        bar: Any = self.training_bar
        bar.total = total
        if counts["steps"]:
            padding = padding_share(counts["tokens"], counts["padded_tokens"])
            each = counts["samples"] / counts["steps"]
            bar.set_postfix_str(f"{each:.1f} samples/step, {padding:.1%} padding", refresh=False)
        bar.update(min(self._ledger().handled, total) - bar.n)
