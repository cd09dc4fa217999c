"""The fixed batches: against accelerate, transformers and LLaMA-Factory themselves, and by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from odb_factory.core.sample import SampleMeta
from odb_factory.tools.plan.fixed import deal, predict_fixed, predict_packing, random_order, row_length, sorted_order
from odb_factory.tools.plan.prediction import Prediction


def metas(*lengths: int, media: tuple[int, ...] = ()) -> list[SampleMeta]:
    return [SampleMeta(index=i, length=n, loss_tokens=1, has_media=i in media) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 10, 11, 12, 30, 37])
def test_batches_are_dealt_as_accelerate_deals_them(size: int, batch_size: int, world_size: int) -> None:
    batches = BatchSampler(SequentialSampler(range(size)), batch_size, drop_last=False)
    if world_size == 1:  # accelerate then leaves the loader as it is
        ranks = [list(batches)]
    else:
        ranks = [list(BatchSamplerShard(batches, world_size, rank)) for rank in range(world_size)]
    assert deal(range(size), batch_size, world_size) == [list(step) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("seed", [0, 42])
def test_the_random_order_is_that_of_the_seeded_sampler(seed: int) -> None:
    torch.manual_seed(seed)
    stock = SeedableRandomSampler(RandomSampler(range(50)).data_source, data_seed=seed)
    assert random_order(50, seed) == list(stock)


def test_sorted_is_transformers_group_by_length() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 500) for _ in range(700)]
    sampler = LengthGroupedSampler(4 * 2, lengths=lengths, generator=torch.Generator().manual_seed(3))
    order = sorted_order(lengths, 4 * 2, 3)
    assert order == list(sampler)
    assert sorted(order) == list(range(700))
    batches = [[lengths[i] for i in order[start : start + 4]] for start in range(0, 700, 4)]
    spread = sum(max(batch) - min(batch) for batch in batches) / len(batches)
    assert spread < 30  # of 500: mega-batches are sorted


class TestRowLength:
    def test_the_longest_counts_in_multiples(self) -> None:
        assert row_length(metas(3, 17, 9), multiple=8, dummy_tokens=0) == 24

    def test_the_dummy_image_widens_the_first_row_only(self) -> None:
        assert row_length(metas(3, 17, 9), multiple=8, dummy_tokens=10) == 24
        assert row_length(metas(17, 3, 9), multiple=8, dummy_tokens=10) == 32

    def test_there_is_none_where_a_sample_has_media(self) -> None:
        assert row_length(metas(17, 3, 9, media=(1,)), multiple=8, dummy_tokens=10) == 24


def on_two_ranks(
    samples: list[SampleMeta], *, accumulation: int = 1, attention_length: int | None = None
) -> Prediction:
    """Batches of 2 in the order of the samples."""
    return predict_fixed(
        "standard",
        samples,
        range(len(samples)),
        batch_size=2,
        world_size=2,
        accumulation=accumulation,
        multiple=1,
        dummy_tokens=0,
        attention_length=attention_length,
        exact=True,
    )


def test_an_epoch_of_fixed_batches_by_hand() -> None:
    """Two ranks, batches of 2, five samples: [0 1 | 2 3] [4 0 | 1 2]."""
    samples = metas(10, 20, 30, 40, 50)
    prediction = on_two_ranks(samples, accumulation=3)
    assert prediction.steps == 2
    assert prediction.updates == 1
    assert prediction.samples == 8
    assert prediction.samples_per_step == 4
    assert prediction.tokens == 150 + 10 + 20 + 30
    assert prediction.padded_tokens == 2 * 20 + 2 * 40 + 2 * 50 + 2 * 30
    assert prediction.slowest_work == 80 + 100
    assert prediction.padding == pytest.approx(1 - 210 / 280)
    assert prediction.ideal_share == pytest.approx(150 / (2 * 180))  # a repeated sample is no gain


def test_fixed_batches_pay_for_attention_by_their_row_length() -> None:
    """[0 1 | 2 3] of rows of 20 and 40: the second takes 80 x (1 + 40 / 80); the samples alone, each by its length."""
    prediction = on_two_ranks(metas(10, 20, 30, 40), attention_length=80)
    assert prediction.padded_tokens == 40 + 80
    assert prediction.slowest_work == 120
    assert prediction.useful_work == 11 + 25 + 41 + 60
    assert prediction.ideal_share == pytest.approx(137 / (2 * 120))


def test_packed_samples_pay_for_attention_to_themselves_only() -> None:
    """Rows of 63 + 1 tokens: of 40 and 23, and of 30."""
    prediction = predict_packing(
        metas(40, 23, 30),
        cutoff=64,
        rows_at_once=10,
        batch_size=1,
        world_size=2,
        accumulation=1,
        multiple=8,
        attention_length=10,
    )
    assert prediction.steps == 1
    assert prediction.padded_tokens == 128
    assert prediction.slowest_work == 64 + 160 + 52  # 40 x 40 / 10 and 23 x 23 / 10
    assert prediction.useful_work == 93 + 160 + 52 + 90


def encoder(cutoff: int) -> Any:
    """LLaMA-Factory's packing processor over ready-made lengths."""
    from types import SimpleNamespace

    from llamafactory.data.processor import PackedSupervisedDatasetProcessor
    from llamafactory.hparams import DataArguments

    class Ready(PackedSupervisedDatasetProcessor):
        def _encode_data_example(self, prompt: Any, **_: Any) -> Any:
            count = min(int(prompt[0]["content"]), self.data_args.cutoff_len)  # truncation
            return [1] * count, [1] * count

    data_args = DataArguments(template="default", dataset="any", cutoff_len=cutoff, packing=True)  # which lowers it
    return Ready(template=None, tokenizer=SimpleNamespace(pad_token_id=0), processor=None, data_args=data_args)


@pytest.mark.parametrize("seed", [0, 1])
def test_packing_makes_as_many_rows_as_llamafactory(seed: int) -> None:
    rng = random.Random(seed)
    cutoff, at_once = 96, 20
    lengths = [rng.randint(1, 90) for _ in range(48)] + [cutoff, cutoff]  # the last two are truncated
    rows = 0
    for start in range(0, 50, at_once):
        part = lengths[start : start + at_once]
        columns = {name: [None] * len(part) for name in ("_system", "_tools", "_images", "_videos", "_audios")}
        prompts = [[{"role": "user", "content": str(n)}] for n in part]
        packed = encoder(cutoff).preprocess_dataset({"_prompt": prompts, "_response": [[{}]] * len(part), **columns})
        assert {len(row) for row in packed["input_ids"]} == {cutoff}
        rows += len(packed["input_ids"])
    prediction = predict_packing(
        metas(*lengths),
        cutoff=cutoff,
        rows_at_once=at_once,
        batch_size=1,
        world_size=1,
        accumulation=1,
        multiple=8,
    )
    assert prediction.steps == rows
    assert prediction.padded_tokens == rows * cutoff
    assert prediction.samples == 50
