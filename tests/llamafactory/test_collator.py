"""The batch that we make equals the stock collator's to the last bit, and costs what the core says that it costs."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from odb_factory.core.budget import Budget
from odb_factory.core.grouping import group_window
from odb_factory.llamafactory.collator import OdbCollator, dummy_tokens
from odb_factory.llamafactory.online_dataset import observe_online
from tests.llamafactory.helpers import PAD_MULTIPLE, Parts, assert_same, row

SHORT = row("What is 3 + 4?", "7")
LONG = row("Count from 1 to 9.", " ".join(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"] * 6))
TURNS = row("Add 2.", "The total is 2.", "Add 5.", "The total is 7.", "Add 1.", "The total is 8.", system="Be brief.")


def groups(media: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Groups of rows that differ in what media they hold."""
    one = row("<image>What is this?", "a small picture", images=[media["small"]])
    grey = row("Look:\n<image>\nWhat is it?", "a grey one, then", "Sure?", "yes", images=[media["grey"]])
    several = row("<image><image>Compare <image>", "all differ", images=[media["wide"], media["small"], media["wide"]])
    later = row("Hello", "hi", "<image>And this?", "wide", images=[media["wide"]])
    mp4 = row("<video>What happens?", "nothing but noise", videos=[media["mp4"]])
    avi = row("Describe this: <video>", "noise", "Really?", "yes, really", videos=[media["avi"]])
    frames = row("<video>What happens?", "frame follows frame", videos=[media["frames"]])
    both = row("<image>Is it in the video <video>?", "no", images=[media["grey"]], videos=[media["mp4"]])
    return {
        "one text": [SHORT],
        "texts": [SHORT, TURNS, LONG],
        "one image": [one],
        "images": [one, grey, later],
        "several images": [several],
        "text first": [SHORT, one, TURNS, several],
        "image first": [grey, SHORT, later, LONG],
        "video": [mp4],
        "videos": [avi, mp4],
        "text and video": [SHORT, avi, LONG],
        "frames": [frames, SHORT],
        "image and video": [one, mp4, several, avi, SHORT, frames],
        "image and video in one sample": [both, SHORT, grey],
    }


NAMES = tuple(groups(dict.fromkeys(("small", "wide", "grey", "mp4", "avi", "frames"), "")))
TEXT_NAMES = ("one text", "texts")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.bfloat16, torch.bfloat16)], ids=["float32", "bf16"])
def test_batch_equals_stock(vl: Parts, media: dict[str, Any], name: str, dtypes: tuple[Any, Any]) -> None:
    rows = groups(media)[name]
    stock = vl.stock_batch(rows, dtypes[0])
    assert_same(vl.odb_batch(rows, *dtypes), stock)
    assert stock["position_ids"].shape == (4, *stock["input_ids"].shape)  # the model's own rope indices took part
    pixels = {key: value.dtype for key, value in stock.items() if key.startswith("pixel_values")}
    assert pixels
    assert set(pixels.values()) == {dtypes[0]}


@pytest.mark.parametrize("name", NAMES)
def test_batch_equals_stock_for_qwen2_5_vl(vl2: Parts, media: dict[str, Any], name: str) -> None:
    rows = groups(media)[name]
    stock = vl2.stock_batch(rows)
    assert_same(vl2.odb_batch(rows), stock)
    assert ("second_per_grid_ts" in stock) == any(r["_videos"] for r in rows)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_batch_equals_stock_for_a_text_model(text: Parts, media: dict[str, Any], name: str) -> None:
    rows = groups(media)[name]
    stock = text.stock_batch(rows)
    assert_same(text.odb_batch(rows), stock)
    assert set(stock) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize("option", ["train_on_prompt", "mask_history"])
@pytest.mark.parametrize("name", ["texts", "images", "image and video"])
def test_batch_equals_stock_with_other_labels(vl: Parts, media: dict[str, Any], name: str, option: str) -> None:
    rows = groups(media)[name]
    changed = vl.with_data_args(**{option: True})
    stock = changed.stock_batch(rows)
    assert_same(changed.odb_batch(rows), stock)
    if any(len(r["_prompt"]) > 1 for r in rows) or option == "train_on_prompt":
        assert not torch.equal(stock["labels"], vl.stock_batch(rows)["labels"])


@pytest.mark.parametrize("cutoff", [24, 40])
def test_batch_equals_stock_for_cut_texts(vl: Parts, cutoff: int) -> None:
    parts = vl.with_data_args(cutoff_len=cutoff)
    stock = parts.stock_batch([SHORT, TURNS, LONG])
    assert_same(parts.odb_batch([SHORT, TURNS, LONG]), stock)
    assert int(stock["attention_mask"].sum(-1).max()) == cutoff


def test_images_of_all_kinds(vl: Parts, media: dict[str, Any]) -> None:
    """As LLaMA-Factory takes them: paths, bytes, the datasets library's pairs, and opened ones."""
    content = Path(media["grey"]).read_bytes()
    images = [media["small"], content, {"bytes": content, "path": None}, {"bytes": None, "path": media["wide"]}]
    rows = [row("<image>" * 5, "five", images=[*images, Image.open(media["wide"])]), SHORT]
    assert_same(vl.odb_batch(rows), vl.stock_batch(rows))


def test_batch_equals_stock_without_a_model(vl: Parts, media: dict[str, Any]) -> None:
    """`predict_with_generate` gives the collator no model, and so no rope indices."""
    parts = replace(vl, model=None)
    rows = groups(media)["image and video"]
    stock = parts.stock_batch(rows)
    assert_same(parts.odb_batch(rows), stock)
    assert "position_ids" not in stock


def test_an_odd_list_of_frames_is_the_same_to_the_model(vl: Parts, media: dict[str, Any]) -> None:
    """Stock appends a frame to the list that it counts tokens of, and describes the longer one in its batch."""
    rows = [row("<video>What happens?", "frame follows frame", videos=[media["odd_frames"]])]
    ours, stock = vl.odb_batch(rows), vl.stock_batch(rows)
    described = [batch.pop("video_metadata")[0].frames_indices for batch in (ours, stock)]
    assert described == [[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5]]  # the model does not read it
    assert_same(ours, stock)


def test_pixels_in_another_type_than_the_rest(vl: Parts, media: dict[str, Any]) -> None:
    rows = groups(media)["image and video"]
    ours, stock = vl.odb_batch(rows, torch.float32, torch.bfloat16), vl.stock_batch(rows)
    for key in ("pixel_values", "pixel_values_videos"):
        stock[key] = stock[key].to(torch.bfloat16)
    assert_same(ours, stock)
    dataset = vl.online(groups(media)["one image"], torch.bfloat16)
    assert dataset[0]["mm_inputs"]["pixel_values"].dtype == torch.bfloat16  # halved already while it waits


def test_order_of_samples_is_the_order_of_rows(vl: Parts, media: dict[str, Any]) -> None:
    rows = groups(media)["text first"]
    there, back = vl.odb_batch(rows), vl.odb_batch(rows[::-1])
    assert torch.equal(there["input_ids"], back["input_ids"].flip(0))
    assert not torch.equal(there["pixel_values"], back["pixel_values"])
    assert_same(back, vl.stock_batch(rows[::-1]))


def test_collating_changes_neither_samples_nor_the_stock_collator(vl: Parts, media: dict[str, Any]) -> None:
    stock = vl.stock_collator()
    plugin = stock.template.mm_plugin
    dataset = vl.online([SHORT, *groups(media)["images"]])
    samples = [dataset[i] for i in range(len(dataset))]
    collator = OdbCollator(stock, None)
    first = collator(samples[:1])  # with the dummy image
    assert_same(collator(samples[:1]), first)
    before = pickle.dumps(samples)
    assert_same(collator(samples), collator(samples))
    assert pickle.dumps(samples) == before
    assert stock.template.mm_plugin is plugin is vl.template.mm_plugin
    assert "ready" not in vars(plugin)


def test_data_set_and_collator_pickle(vl: Parts, media: dict[str, Any]) -> None:
    """`start_method: spawn` sends both to the collate process."""
    rows = groups(media)["text first"]
    stock = vl.stock_collator()
    dataset, collator = pickle.loads(pickle.dumps((vl.online(rows), OdbCollator(stock, None))))
    assert_same(collator([dataset[i] for i in range(len(rows))]), vl.stock_batch(rows))


# -- every medium is read once


class Counted:
    """Counts how often images are opened and videos decoded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from llamafactory.data.mm_plugin import Qwen2VLPlugin

        self.images: Counter[str] = Counter()
        self.videos: Counter[str] = Counter()
        opened, regularize = Image.open, Qwen2VLPlugin._regularize_videos

        def open_image(file: Any, *more: Any, **named: Any) -> Any:
            self.images[file] += 1
            return opened(file, *more, **named)

        def regularize_videos(plugin: Any, videos: list[Any], **named: Any) -> Any:
            self.videos.update(str(video) for video in videos)
            return regularize(plugin, videos, **named)

        patch.setattr("llamafactory.data.mm_plugin.Image.open", open_image)
        patch.setattr(Qwen2VLPlugin, "_regularize_videos", regularize_videos)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    return Counted(monkeypatch)


@pytest.mark.parametrize("name", ["images", "several images", "frames", "image and video in one sample"])
def test_each_medium_is_decoded_once(vl: Parts, media: dict[str, Any], counted: Counted, name: str) -> None:
    rows = groups(media)[name]
    vl.odb_batch(rows)
    images = Counter(file for r in rows for file in r["_images"] or ())
    images.update(frame for r in rows for video in r["_videos"] or () if isinstance(video, list) for frame in video)
    assert counted.images == images
    assert counted.videos == Counter(str(video) for r in rows for video in r["_videos"] or ())


def test_stock_decodes_twice(vl: Parts, media: dict[str, Any], counted: Counted) -> None:
    """What the test above would count if nothing were remembered."""
    vl.stock_batch(groups(media)["one image"])
    assert counted.images == {media["small"]: 2}


# -- the cost model


def test_dummy_tokens_are_those_that_stock_adds(vl: Parts, vl2: Parts, text: Parts) -> None:
    added = []
    for parts in (vl, vl2, text):
        features = parts.stock_features([SHORT])
        before = len(features[0]["input_ids"])
        parts.stock_collator()(features)
        added.append(len(features[0]["input_ids"]) - before)
        assert dummy_tokens(parts.template, parts.tokenizer, parts.processor) == added[-1]
    assert added[0] > 0
    assert added[1] > 0
    assert added[2] == 0


@pytest.fixture(scope="module")
def pool(vl: Parts, media: dict[str, Any]) -> list[dict[str, Any]]:
    """Processed samples of many lengths, half of them without media."""
    rng = random.Random(5)
    rows = [r for group in ("images", "several images", "video") for r in groups(media)[group]]
    rows += [row("x " * rng.randint(1, 40), "y " * rng.randint(1, 60)) for _ in range(12)]
    rows += [row("Go.", "y " * n) for n in (20, 21, 22, 23)]  # as long as each other: the dummy image decides
    dataset = vl.online(rows)
    return [dataset[i] for i in range(len(rows))]


@pytest.fixture(scope="module")
def collate(vl: Parts) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    return OdbCollator(vl.stock_collator(), None)


def test_padded_length_is_exact(vl: Parts, pool: list[dict[str, Any]], collate: Any) -> None:
    dummy = dummy_tokens(vl.template, vl.tokenizer, vl.processor)
    budget = Budget(tokens=1, pad_to_multiple_of=PAD_MULTIPLE, dummy_tokens=dummy)
    blind = Budget(tokens=1, pad_to_multiple_of=PAD_MULTIPLE)
    rng = random.Random(0)
    metas = [observe_online(i, sample) for i, sample in enumerate(pool)]
    without_media = [m for m in metas if not m.has_media]
    widened = 0
    for turn in range(60):
        chosen = rng.sample(without_media if turn % 2 else metas, rng.randint(1, 5))
        chosen.sort(key=lambda meta: meta.length)  # as the collate process does
        shape = tuple(collate([pool[meta.index] for meta in chosen])["input_ids"].shape)
        assert shape == (len(chosen), budget.padded_length(chosen)), [m.length for m in chosen]
        widened += budget.padded_length(chosen) != blind.padded_length(chosen)
    assert widened > 5  # the dummy image mattered


def test_groups_of_the_core_cost_what_the_batch_holds(vl: Parts, pool: list[dict[str, Any]], collate: Any) -> None:
    dummy = dummy_tokens(vl.template, vl.tokenizer, vl.processor)
    metas = [observe_online(i, sample) for i, sample in enumerate(pool)]
    for tokens in (128, 256, 600):
        budget = Budget(tokens=tokens, pad_to_multiple_of=PAD_MULTIPLE, dummy_tokens=dummy)
        made = group_window(metas, budget)
        assert sorted(s.index for group in made for s in group.samples) == list(range(len(pool)))
        for group in made:
            batch = collate([pool[s.index] for s in group.samples])
            assert batch["input_ids"].numel() == group.cost
            assert group.cost <= tokens or len(group.samples) == 1
            assert int(batch["attention_mask"].sum()) == group.tokens
            assert int((batch["labels"][:, 1:] != -100).sum()) == group.loss_tokens
