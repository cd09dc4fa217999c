"""Puts a fault into the real processes of a rank, at the phase that its collate process announces.

The functions below are wrapped before the loader forks its collate process, which so carries them along.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odb_factory import OdbDataLoader, StepInfo
from odb_factory.runtime import collate_process, exchange, loader, rounds, worker
from odb_factory.runtime.messages import Phase
from tests.dist import children, kill
from tests.faults.cell import BETWEEN, FORKED, NEXT_EPOCH, STARTING, STEP, WORKER_FORKED, Cell
from tests.runtime.helpers import Lengths, PadCollate, wait_until

FOR_EVER = 600.0
PATIENCE = 40.0
"""How long one process waits for another one of the same cell (seconds)."""


class TrainingError(Exception):
    """What the consumer's loop body raises."""


class Injector:
    """The fault of a cell on one rank.

    Args:
        leaders: process ids of all ranks; each leads a process group of its own.
        folder: where the ranks of a cell tell each other what has happened.
    """

    def __init__(self, cell: Cell, rank: int, leaders: list[int], folder: str) -> None:
        self.cell = cell
        self.rank = rank
        self.leaders = leaders
        self.folder = Path(folder)
        context = multiprocessing.get_context("fork")
        self.fired = context.Value("b", 0)
        """Once is enough: an early `break` makes the loader fork a new collate process."""
        self.armed = context.Value("b", 0)
        """The data set does its worst from now on."""
        self.phase = ""
        """In the collate process: what it announced last."""

    def install(self) -> None:
        """Wrap what passes the points."""
        for module in (collate_process, rounds):
            module.send = self._announcing(module.send)  # type: ignore[attr-defined]
        collate_process._settle = self._before(collate_process._settle, FORKED)  # type: ignore[attr-defined]
        worker.WorkerInit.__call__ = self._before(worker.WorkerInit.__call__, WORKER_FORKED)  # type: ignore[method-assign]
        collate_process.try_gloo = self._before(collate_process.try_gloo, STARTING)  # type: ignore[attr-defined]
        for name in ("minimum", "sum", "prefix_sum"):
            setattr(exchange.GlooExchange, name, self._exchanging(getattr(exchange.GlooExchange, name)))
        loader.meet = self._noting_the_port(loader.meet)  # type: ignore[attr-defined]

    def _announcing(self, send: Callable[..., None]) -> Callable[..., None]:
        def announce(sock: Any, message: Any) -> None:
            send(sock, message)
            if isinstance(message, Phase):
                self.phase = message.name
                self._pass(message.name)

        return announce

    def _exchanging(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def exchange_(group: Any, values: Any, what: str) -> Any:
            self._pass(what)
            return reduce(group, values, what)

        return exchange_

    def _before(self, function: Callable[..., Any], point: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._pass(point)
            return function(*arguments)

        return call

    def _noting_the_port(self, meet: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            result = meet(*args)
            (self.folder / f"port-{result[0].port}").touch()
            return result

        return note

    # --- in the collate process

    def _pass(self, point: str) -> None:
        if not (self.cell.is_faulty(self.rank) and point == self.cell.point) or self.fired.value:
            return
        if point == NEXT_EPOCH and not (self.folder / f"epoch-{self.rank}").exists():
            return  # the first epoch has not been
        if self.cell.action == "raise in the collate function":
            return  # that is the collate function's business
        match self.cell.action:
            case "kill the collate process":
                self._note()
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill the rank":
                self._note()
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(FOR_EVER)  # stays in this phase: that the others get on is not thanks to this process
            case "kill a worker":
                wait_until(multiprocessing.active_children, PATIENCE)
                self._note()
                kill(multiprocessing.active_children()[0].pid or 0)
            case "raise in the data set" | "stall the data set" | "kill a worker from within":
                self.fired.value = 1
                self.armed.value = 1
            case "stall the collate process":
                self._note()
                time.sleep(FOR_EVER)
            case "interrupt":
                self._interrupt()
                time.sleep(FOR_EVER)
            case "signal":
                self._signal_all()
            case "raise in the step" | "break":
                self._note()
                time.sleep(FOR_EVER)  # until the trainer closes the loader
            case other:
                raise AssertionError(f"{other} cannot be done in the collate process")

    def _interrupt(self) -> None:
        """As a terminal does: all processes of the rank, or of all ranks at the same time."""
        own = self.leaders[self.rank]
        others = [leader for leader in self.leaders if leader != own] if self.cell.everywhere else []
        ready = [self.folder / f"training-{rank}" for rank in range(len(self.leaders))]
        assert wait_until(lambda: all(path.exists() for path in ready), PATIENCE), "a rank does not train"
        try:
            (self.folder / "interrupted").touch(exist_ok=False)
        except FileExistsError:
            return  # another rank was first, and has interrupted this one
        self._note()
        for leader in (*others, own):  # in the trainer, nothing comes after its own
            os.killpg(leader, signal.SIGINT)

    def _signal_all(self) -> None:
        """As a launcher or a scheduler does: all processes of this rank get it."""
        self._note()
        os.killpg(self.leaders[self.rank], signal.Signals[self.cell.signal])

    def _note(self) -> None:
        self.fired.value = 1
        # CLOCK_MONOTONIC is the same in all processes of the machine
        (self.folder / f"fault-{self.rank}").write_text(repr(time.monotonic()))

    # --- in the workers, and in the collate function

    def on_read(self) -> None:
        """The data set reads a sample."""
        if not self.armed.value:
            return
        if not (self.folder / f"fault-{self.rank}").exists():
            self._note()
        if self.cell.action == "raise in the data set":
            raise KeyError("injected")
        if self.cell.action == "kill a worker from within":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOR_EVER)

    def on_collate(self) -> None:
        """The collate function is called."""
        faulty = self.cell.action == "raise in the collate function" and self.cell.is_faulty(self.rank)
        if faulty and self.phase == self.cell.point:
            self._note()
            raise ZeroDivisionError("injected")

    # --- in the trainer

    def on_step(self, loader: OdbDataLoader, info: StepInfo) -> bool:
        """In the training step; True: leave the loop."""
        if not self.cell.is_faulty(self.rank) or info.epoch:
            return False
        if self.cell.point == STEP:
            return info.step == int(STEP.split()[1]) and self._act(loader)
        if self.cell.action in ("raise in the step", "break") and self.cell.point != BETWEEN:
            assert wait_until(lambda: self.fired.value, PATIENCE), "the collate process never came to the phase"
            if self.cell.action == "break":
                return True
            raise TrainingError(f"rank {self.rank} in step {info.step}")
        return False

    def on_epoch_end(self, loader: OdbDataLoader) -> None:
        """Between two epochs."""
        (self.folder / f"epoch-{self.rank}").touch()
        session = loader._session
        if self.cell.point == BETWEEN and self.cell.is_faulty(self.rank) and not self.fired.value:
            assert session is not None
            assert wait_until(lambda: session.phase == NEXT_EPOCH, PATIENCE)
            self._act(loader)

    def _act(self, loader: OdbDataLoader) -> bool:
        assert loader._session is not None
        collate = loader._session.process.pid or 0
        workers = children(collate)
        if self.cell.action in ("raise in the data set", "stall the data set"):
            self.armed.value = 1
            return False
        if self.cell.action == "interrupt":
            self._interrupt()
            time.sleep(PATIENCE)
            raise AssertionError("the interrupt did not come")
        self._note()
        match self.cell.action:
            case "signal":
                self._signal_all()
            case "kill the collate process":
                kill(collate)
            case "kill the rank":
                kill(os.getpid())
            case "kill a worker":
                kill(workers[0])
            case "raise in the step":
                raise TrainingError(f"rank {self.rank} at {self.cell.point}")
            case "stall the trainer":
                others = [r for r in range(self.cell.world) if r != self.rank]
                assert wait_until(lambda: all((self.folder / f"ended-{r}").exists() for r in others), PATIENCE)
                (self.folder / f"released-{self.rank}").write_text(repr(time.monotonic()))
            case "break":
                return True
            case other:
                raise AssertionError(f"{other} cannot be done in the trainer")
        return False


class FaultyData(Lengths):
    """Asks the injector before each read."""

    injector: Injector

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.injector.on_read()
        return super().__getitem__(index)


class FaultyCollate:
    """Asks the injector before each batch; batches are so large that the collate process cannot run far ahead."""

    def __init__(self, injector: Injector, fat: bool) -> None:
        self.injector = injector
        self.fat = fat
        self.inner = PadCollate()

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        self.injector.on_collate()
        batch: dict[str, Any] = self.inner(samples)
        if self.fat:
            batch["fat"] = bytes(1_000_000)
        return batch


def note_end(folder: str, rank: int) -> None:
    """This rank's loader has ended."""
    with contextlib.suppress(OSError):
        (Path(folder) / f"ended-{rank}").write_text(repr(time.monotonic()))
