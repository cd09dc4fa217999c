"""The fast subset of the fault table; the whole of it runs by `python -m tests.faults`."""

from __future__ import annotations

import pytest

from tests.faults.cell import Cell
from tests.faults.judge import run_cell
from tests.faults.table import CELLS, FAST

FAST_CELLS = [cell for cell in CELLS if cell.fast]


@pytest.mark.distributed
@pytest.mark.parametrize("cell", FAST_CELLS, ids=lambda cell: cell.name)
def test_every_rank_ends_in_time_with_a_clear_error_and_nothing_is_left(cell: Cell) -> None:
    verdict = run_cell(cell)
    assert not verdict.problems, "\n".join(verdict.problems)


def test_the_cells_of_the_table_have_names_of_their_own_and_the_fast_ones_are_among_them() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS) >= 40
    assert {(cell.fault, cell.point) for cell in FAST_CELLS if cell.action != "nothing"} == FAST
