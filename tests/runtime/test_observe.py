"""What the batching is told of a sample."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from odb_factory.runtime.observe import count_loss_tokens, count_patches, observe_sample


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize(
    ("labels", "targets"),
    [
        ([-100, -100, 5, 6], 2),
        ([7, -100, 5, -100], 1),  # the first label is no target: nothing predicts it
        ([7, 8, 9], 2),
        ([-100, -100], 0),
        ([3], 0),
        ([-100], 0),
    ],
)
def test_loss_tokens_are_the_supervised_targets(kind: Any, labels: list[int], targets: int) -> None:
    assert count_loss_tokens(kind(labels)) == targets
    meta = observe_sample(3, {"input_ids": kind([1] * len(labels)), "labels": kind(labels)})
    assert (meta.index, meta.length, meta.loss_tokens) == (3, len(labels), targets)


def test_no_labels_at_all_have_no_targets() -> None:
    assert count_loss_tokens([]) == 0
    assert count_loss_tokens(torch.tensor([], dtype=torch.long)) == 0


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_without_labels_every_token_but_the_first_is_a_target(kind: Any) -> None:
    meta = observe_sample(0, {"input_ids": kind([4, 5, 6, 7])})
    assert (meta.length, meta.loss_tokens, meta.patches, meta.has_media) == (4, 3, 0, False)


@pytest.mark.parametrize(
    ("grids", "patches"),
    [
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}, 28),
        ({"image_grid_thw": [[1, 4, 6]]}, 24),
        ({"video_grid_thw": torch.tensor([[3, 4, 4]])}, 48),
        ({"image_grid_thw": [[1, 2, 2]], "video_grid_thw": [[2, 2, 2]]}, 12),
        ({"image_grid_thw": None}, 0),
        ({"image_grid_thw": torch.empty(0, 3, dtype=torch.long)}, 0),
    ],
)
def test_patches_come_from_the_grids(grids: dict[str, Any], patches: int) -> None:
    assert count_patches(grids) == patches
    meta = observe_sample(0, {"input_ids": [1, 2, 3], **grids})
    assert meta.patches == patches
    assert meta.has_media == (patches > 0)


def test_any_mapping_will_do() -> None:
    assert observe_sample(1, UserDict(input_ids=[1, 2])).length == 2


@pytest.mark.parametrize("sample", [[1, 2, 3], {"text": "hello"}, None])
def test_another_sample_is_an_error_that_says_what_to_do(sample: Any) -> None:
    with pytest.raises(TypeError, match=rf"sample 17 is a {type(sample).__name__}.*observe=.*SampleMeta"):
        observe_sample(17, sample)


def test_an_empty_sample_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="empty: sample 5 has 0 tokens"):
        observe_sample(5, {"input_ids": [], "labels": []})
