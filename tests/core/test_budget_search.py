"""The search for a token budget, with arithmetic in place of memory."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.core.budget import Budget
from odb_factory.core.budget_search import RESOLUTION, Found, Growth, search_budget
from odb_factory.core.group_shapes import Bounds, GroupShape, group_shapes
from odb_factory.core.sample import SampleMeta

BOUNDS = Bounds(longest=512, most_samples=256, pad_to_multiple_of=8, dummy_tokens=6, max_patches=None, media=True)


class Machine:
    """Needs so many bytes for a step: a fixed part, one for each token, one for each pair of tokens of a row."""

    def __init__(self, capacity: float, fixed: float = 1e6, linear: float = 100.0, square: float = 0.0) -> None:
        self.capacity = capacity
        self.parts = fixed, linear, square
        self.out_of_memory_above = inf
        self.ran: list[int] = []
        self.most = 0.0

    def need(self, shape: GroupShape) -> float:
        fixed, linear, square = self.parts
        media = 1.5 if shape.media else 1.0
        return fixed + media * linear * shape.padded_tokens + square * shape.padded_tokens * shape.width

    def measure(self, shape: GroupShape) -> float:
        self.ran.append(shape.padded_tokens)
        if shape.padded_tokens > self.out_of_memory_above:
            return inf
        self.most = max(self.most, self.need(shape))
        return self.need(shape) - self.capacity

    def worst(self, budget: int, bounds: Bounds = BOUNDS) -> float:
        return max(self.need(shape) for shape in group_shapes(budget, bounds))


def search(
    machine: Machine, bounds: Bounds = BOUNDS, *, lowest: int = 64, highest: int = 2**20, slack: float = 0.0
) -> Found:
    return search_budget(
        machine.measure, lambda b: group_shapes(b, bounds), lowest=lowest, highest=highest, unit=64, slack=slack
    )


@given(
    capacity=st.floats(2e6, 1e9),
    linear=st.floats(20, 1000),
    square=st.floats(0, 3),
    slack=st.sampled_from([0.0, 1e5, 1e7]),
)
def test_it_finds_the_largest_budget_that_fits(capacity: float, linear: float, square: float, slack: float) -> None:
    machine = Machine(capacity, linear=linear, square=square)
    found = search(machine, lowest=64, highest=2**17, slack=slack)
    if found.budget == 0:
        assert machine.worst(64) > capacity
        return
    assert found.budget % 64 == 0
    assert machine.worst(found.budget) <= capacity
    step = max(64, found.budget // RESOLUTION)
    if found.budget < 2**17:
        # what may not be tried since it is foreseen to be too much may be a little less than that
        assert machine.worst(found.budget + 2 * step + found.budget // 32) > capacity


@given(capacity=st.floats(2e6, 1e9), linear=st.floats(20, 1000), square=st.floats(0, 3))
def test_steps_far_above_the_memory_are_not_run(capacity: float, linear: float, square: float) -> None:
    machine = Machine(capacity, linear=linear, square=square)
    if machine.worst(512) > capacity:
        return  # the first two of a kind have nothing to be foreseen from
    search(machine)
    assert machine.most <= capacity * 1.001


def test_the_same_answers_take_the_same_way() -> None:
    one, other = Machine(3e7, square=0.5), Machine(3e7, square=0.5)
    assert search(one) == search(other)
    assert one.ran == other.ran
    assert len(one.ran) == len(set(one.ran)) or len(one.ran) < 60


def test_running_out_counts_as_too_large() -> None:
    machine = Machine(inf)
    machine.capacity = 1e12
    machine.out_of_memory_above = 3000
    found = search(machine)
    assert 2900 <= found.budget <= 3000
    assert any(probe.over == inf for probe in found.probes)


def test_the_top_is_tried_itself() -> None:
    assert search(Machine(1e12), highest=5000).budget == 5056  # rounded up to the unit
    assert search(Machine(1e12), lowest=6000, highest=100).budget == 6016


def test_nothing_below_the_lowest_is_found() -> None:
    machine = Machine(1e6 + 150 * 1000)  # 1000 tokens of media fit
    assert search(machine, lowest=960).budget == 960
    found = search(machine, lowest=1088)
    assert found.budget == 0
    assert found.over == pytest.approx(150 * 1088 - 150 * 1000, rel=0.2)


@pytest.mark.parametrize("parts", [(5.0, 2.0, 0.0), (5.0, 2.0, 0.25), (100.0, 0.0, 1.0)])
def test_growth_is_exact_for_quadratics_and_never_too_low(parts: tuple[float, float, float]) -> None:
    fixed, linear, square = parts
    growth = Growth()
    assert growth.predict(10, 10) == -inf

    def need(tokens: int, width: int) -> float:
        return fixed + linear * tokens + square * tokens * width

    for tokens in (64, 128, 256):
        growth.add(tokens, tokens, need(tokens, tokens))
        if tokens > 64:
            assert growth.predict(1000, 1000) >= need(1000, 1000) * (1 - 1e-9)
            assert growth.predict(1000, 250) >= need(1000, 250) * (1 - 1e-9)
    assert growth.predict(1000, 1000) == pytest.approx(need(1000, 1000))
    growth.add(512, 512, inf)
    assert growth.predict(1000, 1000) == pytest.approx(need(1000, 1000))
    growth.add(512, 256, need(512, 256))  # two rows
    for tokens, width in ((768, 256), (700, 350), (1024, 256)):
        assert need(tokens, width) * (1 - 1e-9) <= growth.predict(tokens, width) <= 1.5 * need(tokens, width)


def test_less_need_with_more_tokens_is_not_extrapolated() -> None:
    growth = Growth()
    growth.add(64, 64, 100.0)
    growth.add(128, 64, 90.0)
    assert growth.predict(1000, 64) == 100.0


@given(
    budget=st.integers(1, 4000).map(lambda n: 8 * n),
    longest=st.integers(1, 3000),
    most=st.integers(1, 300),
    dummy=st.sampled_from([0, 6, 70]),
    media=st.booleans(),
)
def test_shapes_are_groups_that_the_budget_allows(
    budget: int, longest: int, most: int, dummy: int, media: bool
) -> None:
    bounds = Bounds(longest=longest, most_samples=most, pad_to_multiple_of=8, dummy_tokens=dummy, media=media)
    rule = Budget(tokens=budget, pad_to_multiple_of=8, dummy_tokens=dummy)
    shapes = group_shapes(budget, bounds)
    assert len({(shape.lengths, shape.media) for shape in shapes}) == len(shapes)
    assert any(shape.media for shape in shapes) == media
    for shape in shapes:
        samples = [
            SampleMeta(index=0, length=n, loss_tokens=1, patches=int(shape.media), has_media=shape.media)
            for n in shape.lengths
        ]
        assert list(shape.lengths[1:]) == sorted(shape.lengths[1:])
        assert min(shape.lengths) >= 1
        assert max(shape.lengths) <= longest
        assert len(samples) <= most
        assert rule.cost(samples) <= shape.padded_tokens <= max(budget, bounds.narrowest)


@given(budget=st.integers(64, 2000).map(lambda n: 8 * n))
def test_shapes_fill_the_budget(budget: int) -> None:
    kinds = {shape.kind: shape for shape in reversed(group_shapes(budget, BOUNDS))}
    for kind in ("full", "short", "mixed", "full media"):
        if kind in kinds:  # otherwise it is the same as another one
            assert kinds[kind].padded_tokens >= budget * 0.85
    assert kinds["long"].width == min(budget, 520)
    assert kinds["media"].width == min(budget, 512)


def test_patches_are_bounded_in_groups_only() -> None:
    bounds = Bounds(longest=512, most_samples=8, max_patches=100, media=True)
    assert group_shapes(512, bounds)[-1].most_patches is None
    assert group_shapes(1024, bounds)[-1].most_patches == 100
