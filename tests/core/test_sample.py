"""Samples and the ways to drop them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from odb_factory.core.sample import BadSample, DropSample, SampleMeta


@pytest.mark.parametrize("length", [0, -1])
def test_an_empty_sample_is_refused_by_its_index(length: int) -> None:
    with pytest.raises(BadSample, match=f"empty: sample 7 has {length} tokens"):
        SampleMeta(index=7, length=length, loss_tokens=0)


@pytest.mark.parametrize("wrong", [{"loss_tokens": -1}, {"patches": -1}])
def test_a_negative_count_is_refused_by_the_index(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample 7 has a negative count"):
        SampleMeta(**{"index": 7, "length": 1, "loss_tokens": 0} | wrong)


@pytest.mark.parametrize("kind", [DropSample, BadSample])
def test_a_dropped_sample_keeps_reason_and_detail_on_its_way_between_processes(kind: Any) -> None:
    error = pickle.loads(pickle.dumps(kind("image is broken", "cat.jpg")))
    assert type(error) is kind
    assert (error.reason, error.detail, str(error)) == ("image is broken", "cat.jpg", "image is broken: cat.jpg")


def test_a_dropped_sample_without_detail_reads_as_its_reason() -> None:
    assert str(DropSample("too long")) == "too long"
