"""The search finds each seeded fault, names the guarantee, and prints the way there."""

from __future__ import annotations

import pytest

from tests.formal.checks import Violation
from tests.formal.mutants import Mutant, mutants
from tests.formal.search import Search
from tests.formal.space import Space

MUTANTS = list(mutants())


@pytest.mark.parametrize("space", {mutant.space for mutant in MUTANTS}, ids=str)
def test_without_a_fault_the_same_search_finds_nothing(space: Space) -> None:
    assert Search(space).run().states > 200


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_found_with_a_counter_example(mutant: Mutant) -> None:
    with mutant.apply(), pytest.raises(Violation) as caught:
        Search(mutant.space).run()
    assert caught.value.guarantee == mutant.caught_by
    (trace,) = caught.value.__notes__
    lines = trace.splitlines()
    assert lines[0] == "COUNTER-EXAMPLE"
    assert lines[1] == str(mutant.space)
    assert lines[3].startswith("the epoch begins: indices by rank [")
    rounds = [line for line in lines if line.startswith("round ")]
    assert rounds == [f"round {number}" for number in range(len(rounds))] != []
    assert lines[-1] == f"VIOLATED {caught.value}"


def test_a_counter_example_tells_all_that_led_there() -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == "overdue is ignored"]
    with mutant.apply(), pytest.raises(Violation) as caught:
        Search(mutant.space).run()
    (trace,) = caught.value.__notes__
    for part in (
        "reads 2 2 9",
        "2 unread",
        "(waited 1)",
        "groups [9]* [2 2]",
        "reports C 3, S 3, G 2, F 1",
        "minima: ",
    ):
        assert part in trace, trace
    for part in ("; T = 1", "plans [9]; keeps [2(waited 2)", "last [0]", "epoch goes on"):
        assert part in trace, trace
