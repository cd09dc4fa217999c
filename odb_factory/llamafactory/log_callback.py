"""LLaMA-Factory's `trainer_log.jsonl`, from which LLaMA Board shows a run: true progress, and the figures of ODB."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from llamafactory.train.callbacks import LogCallback

from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.telemetry import PREFIX


class _Captured:
    """Stands for the callback's thread pool while it makes a line, and keeps the line."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, *call: Any) -> None:
        self.calls.append(call)


class OdbLogCallback(LogCallback):
    """Progress and remaining time follow the samples, since the number of steps is an estimate.

    An existing callback becomes one of this class (`become`): LLaMA Board's signal handler, which stops a run, is bound
    to the object.
    """

    ledger: Callable[[], Ledger]
    thread_pool: Any
    _handled_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._handled_before = self.ledger().handled

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        captured = _Captured()
        pool = self.thread_pool
        self.thread_pool = captured if pool is not None else None
        try:
            super().on_log(args, state, control, **kwargs)
        finally:
            self.thread_pool = pool
        for function, directory, line in captured.calls:
            pool.submit(function, directory, {**line, **self._progress_of(args), **figures_in(state.log_history[-1])})

    def _progress_of(self, args: Any) -> dict[str, Any]:
        ledger = self.ledger()
        total, done = ledger.estimated_samples(args.max_steps), ledger.handled
        here = done - self._handled_before
        left = (time.time() - self.start_time) * (total - done) / here if here else 0.0
        return {"percentage": round(100 * done / total, 2), "remaining_time": str(timedelta(seconds=int(left)))}


def figures_in(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of Online Dynamic Batching in a log."""
    return {name: value for name, value in logs.items() if name.startswith(PREFIX)}
