"""Constants of step time out of Standard's throughput, and of nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.epochs import StepTime
from benchmarks.paper.cells import Cell
from benchmarks.paper.work import Work

TERMS = ("constant", "per_token", "per_square")


class ForbiddenFit(Exception):
    """A fit was about to use a cell that is to be predicted: a fault of the program, never of its user."""


@dataclass(frozen=True)
class Fit:
    """Constants, and what they rest on."""

    time: StepTime
    cells: tuple[Cell, ...]
    """All Standard."""
    terms: tuple[str, ...]
    """Those that were fitted and are above 0; the others were given, or came out at 0."""
    errors: tuple[float, ...]
    """Of each cell: the rate by the model over the cell's, minus 1."""

    @property
    def freedom(self) -> int:
        """Cells minus fitted constants; 0: it goes through every cell and says nothing of how good the model is."""
        return len(self.cells) - len(self.terms)


def only_standard(cells: Sequence[Cell]) -> None:
    """The guard of every fit.

    Raises:
        ForbiddenFit: one of them may not be fitted; names it.
    """
    for cell in cells:
        if not cell.may_be_fitted:
            raise ForbiddenFit(
                f"{cell.method}, {cell.quantity}, {'; '.join(map(str, cell.settings))} is a cell to be predicted; "
                "constants may be fitted to Standard's throughput only."
            )


def fit_all(observed: Sequence[tuple[Cell, Work]], square_ratio: float | None = None) -> Fit:
    """All three constants, none below 0, with the least sum of squared relative errors of the time of a step.

    With fewer cells than constants, or where the best fit wants one below 0, that constant is 0.

    Args:
        square_ratio: per_square / per_token, where it is given and not fitted.
    """
    only_standard([cell for cell, _ in observed])
    basis = np.eye(3) if square_ratio is None else np.array([[1.0, 0.0, 0.0], [0.0, 1.0, square_ratio]])
    seconds = np.array([_step_seconds(cell, work) for cell, work in observed])
    relative = np.array([work.features() for _, work in observed]) @ basis.T / seconds[:, None]
    used, values = _least_squares(relative)
    given = dict(zip(TERMS, map(float, values @ basis[list(used)]), strict=True))
    return _fit(StepTime(**given), observed, tuple(TERMS[i] for i in used))


def _least_squares(relative: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """Columns and positive factors for which the columns' sum comes closest to 1 in all rows; every choice is tried."""
    rows, columns = relative.shape
    best: tuple[float, tuple[int, ...], np.ndarray] | None = None
    for count in range(1, min(rows, columns) + 1):
        for used in itertools.combinations(range(columns), count):
            part = relative[:, used]
            scale = np.abs(part).max(axis=0)  # the columns differ by many orders of magnitude
            values = np.linalg.lstsq(part / scale, np.ones(rows), rcond=None)[0] / scale
            loss = float(((part @ values - 1.0) ** 2).sum())
            if (values > 0).all() and (best is None or loss < best[0] - 1e-12):
                best = loss, used, values
    assert best is not None, "one column alone, of positive numbers, has a positive factor"
    return best[1], best[2]


def fit_constant(cell: Cell, work: Work, *, per_token: float, per_square: float) -> Fit:
    """The constant of a step alone, from one cell; 0 where the tokens alone would take longer than was measured."""
    only_standard([cell])
    constant = _step_seconds(cell, work) - float(work.features()[1:] @ [per_token, per_square])
    time = StepTime(max(0.0, constant), per_token, per_square)
    return _fit(time, [(cell, work)], ("constant",) if constant > 0 else ())


def _fit(time: StepTime, observed: Sequence[tuple[Cell, Work]], terms: tuple[str, ...]) -> Fit:
    errors = tuple(work.rate(time) / float(cell.low or 0.0) - 1.0 for cell, work in observed)
    return Fit(time, tuple(cell for cell, _ in observed), terms, errors)


def _step_seconds(cell: Cell, work: Work) -> float:
    """Seconds of a step as the cell has them."""
    return work.emitted / work.steps / float(cell.low or 0.0)
