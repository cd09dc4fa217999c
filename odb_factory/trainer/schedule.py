"""Learning rate by progress in samples, since the number of updates is not known before the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from odb_factory.trainer.ledger import Ledger

Unit = Literal["samples", "updates"]

SHAPED = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
)
"""Schedules whose shape behind the warm-up depends on the fraction of the run only."""

WITHOUT_STEPS = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules that read no number of steps: they do nothing, or follow what is measured."""

FOLLOWS_SAMPLES = (*SHAPED, "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay")

STABLE, DECAY = "num_stable_steps", "num_decay_steps"
"""Lengths of `warmup_stable_decay` in `lr_scheduler_kwargs`, in updates."""


@dataclass(frozen=True)
class Pace:
    """By what a schedule goes on: in its warm-up, and behind it."""

    warmup: Unit
    rest: Unit


def schedule_kind(args: Any) -> str:
    """The name of the learning rate schedule."""
    return str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))


def warmup_updates(args: Any) -> int:
    """Updates of the warm-up; 0 where there is none, or where it is given as a share of the run."""
    return int(args.warmup_steps) if args.warmup_steps >= 1 else 0


def pace_of(args: Any) -> Pace | None:
    """How the schedule of the training arguments goes on without `max_steps`; None: it reads no number of steps.

    What is given as a share of the run, or follows from its length, goes by samples; what is given in updates goes by
    updates.

    Raises:
        ValueError: it cannot be followed, in one sentence with the remedy.
    """
    kind, given = schedule_kind(args), _kwargs(args)
    if kind in WITHOUT_STEPS:
        return None
    if kind not in FOLLOWS_SAMPLES:
        raise ValueError(
            f"lr_scheduler_type {kind} may need the number of updates, which is not known before the end of an epoch; "
            f"set max_steps, or use one of {', '.join((*FOLLOWS_SAMPLES, *WITHOUT_STEPS))}."
        )
    lengths = [name for name in (STABLE, DECAY) if given.get(name) is not None]
    if kind == "warmup_stable_decay" and len(lengths) == 1:
        missing = DECAY if lengths == [STABLE] else STABLE
        raise ValueError(
            f"lr_scheduler_type {kind} with {lengths[0]} alone needs the number of updates, which is not known before "
            f"the end of an epoch; set max_steps, or {missing} too, or neither (LLaMA-Factory then makes them shares "
            "of the run)."
        )
    in_updates = warmup_updates(args) > 0
    by_warmup = args.warmup_steps > 0 and not in_updates and given.get("timescale") is None
    rest_in_updates = (kind == "warmup_stable_decay" and lengths) or (kind == "inverse_sqrt" and not by_warmup)
    return Pace("updates" if in_updates else "samples", "updates" if rest_in_updates else "samples")


def _kwargs(args: Any) -> Mapping[str, Any]:
    kwargs = args.lr_scheduler_kwargs
    return kwargs if isinstance(kwargs, Mapping) else {}


@dataclass
class Position:
    """Where on a schedule of `ledger.total` ticks the run stands.

    A tick is a sample, or an update, as `pace` says. A warm-up in updates takes that many ticks; the samples that
    remain are spread over the remaining ones.

    Args:
        ledger: of the run.
        pace: see `pace_of`.
        warmup: ticks of the warm-up.
    """

    ledger: Ledger
    pace: Pace = Pace("samples", "samples")
    warmup: int = 0
    handled_in_warmup: int = field(default=0, repr=False)
    """Samples handled when the warm-up ended."""
    updates_in_warmup: int = field(default=0, repr=False)
    """Updates done when the warm-up ended."""

    def __call__(self) -> float:
        """The position in ticks, from 0 to `ledger.total` where it goes on by samples."""
        ledger = self.ledger
        walked = ledger.updates if self.pace.warmup == "updates" else ledger.handled
        if walked <= self.warmup:
            self.handled_in_warmup, self.updates_in_warmup = ledger.handled, ledger.updates
            return float(walked)
        if self.pace.rest == "updates":
            return float(self.warmup + ledger.updates - self.updates_in_warmup)
        total = ledger.total
        if ledger.finished or total <= self.warmup:
            return float(total)
        if self.pace.warmup == "samples":
            return float(ledger.handled)
        share = (ledger.handled - self.handled_in_warmup) / (total - self.handled_in_warmup)
        return self.warmup + share * (total - self.warmup)

    def state(self) -> dict[str, int]:
        """What `restore` needs, fit for JSON."""
        return {"handled_in_warmup": self.handled_in_warmup, "updates_in_warmup": self.updates_in_warmup}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved; older states have no `updates_in_warmup`."""
        self.handled_in_warmup = state["handled_in_warmup"]
        self.updates_in_warmup = state.get("updates_in_warmup", 0)


def follow(scheduler: Any, position: Position) -> None:
    """Make a `LambdaLR` of `position.ledger.total` steps follow `position` instead of counting its own steps.

    The lambdas are replaced by plain functions, which `LambdaLR.state_dict` leaves out of checkpoints.

    Raises:
        TypeError: the scheduler is no LambdaLR.
    """
    if not hasattr(scheduler, "lr_lambdas"):
        raise TypeError(f"odb: {type(scheduler).__name__} cannot follow the samples; set max_steps.")
    scheduler.lr_lambdas = [_at(position, shape) for shape in scheduler.lr_lambdas]


def unfinished_warmup(position: Position) -> list[str]:
    """What a user should know whose run was over before its warm-up, for a warm-up in updates."""
    updates = position.ledger.updates
    if position.pace.warmup == "samples" or updates >= position.warmup:
        return []
    return [
        f"the warm-up of {position.warmup} updates (warmup_steps) was not over when the run ended after {updates}, so "
        "the learning rate never reached its peak; give it as a share of the run, such as warmup_steps: 0.1."
    ]


def _at(position: Position, shape: Callable[[float], float]) -> Callable[[int], float]:
    def factor(_: int) -> float:
        return shape(position())

    return factor
