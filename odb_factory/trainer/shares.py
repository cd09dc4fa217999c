"""`logging_steps`, `eval_steps` and `save_steps` that are given as a share of the run, by samples."""

from __future__ import annotations

from typing import Any

NEVER = 1 << 40
"""A number of steps that no run reaches: keeps the stock callback from acting on an estimate."""

KINDS = {"logging": "should_log", "eval": "should_evaluate", "save": "should_save"}
"""What happens, and the flag that asks for it."""


class Shares:
    """Asks for what is due whenever another such share of the run's samples is done.

    Trainer turns a share into a number of steps, which would change with each estimate of the total: some would come
    twice, others never. Only while the stock callback looks at it does the state hold `NEVER`; what is saved with a
    checkpoint, and what others see, is the estimate.
    """

    def __init__(self) -> None:
        self._done = 0.0

    def begin(self, args: Any, state: Any, done: float) -> None:
        """The run starts, or goes on, with a share `done`: as its arguments say, not those of the checkpoint."""
        self._done = done
        state.compute_steps(args, max(1, state.max_steps))

    def hide(self, args: Any, state: Any) -> None:
        """Until `show`, nothing given as a share is due by steps."""
        for kind in _given_as_shares(args):
            setattr(state, f"{kind}_steps", NEVER)

    def show(self, args: Any, state: Any) -> None:
        """The state says again how many steps a share comes to, by the estimate there is."""
        if _given_as_shares(args):
            state.compute_steps(args, max(1, state.max_steps))

    def ask(self, args: Any, state: Any, control: Any, done: float) -> None:
        """An update is done, and with it the share `done` of the run."""
        for kind in _given_as_shares(args):
            share = getattr(args, f"{kind}_steps")
            late = kind == "eval" and state.global_step < args.eval_delay
            if int(done / share + 1e-9) > int(self._done / share + 1e-9) and not late:
                setattr(control, KINDS[kind], True)
        self._done = done


def _given_as_shares(args: Any) -> list[str]:
    def by_steps(kind: str) -> bool:
        return str(getattr(getattr(args, f"{kind}_strategy"), "value", "")) == "steps"

    values = {kind: getattr(args, f"{kind}_steps") for kind in KINDS}
    return [kind for kind, value in values.items() if value is not None and 0 < value < 1 and by_steps(kind)]
