"""How rows are named and data sets recognised, without a look at their media."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pil

from odb_factory.llamafactory.rows import describe_row, fingerprint_rows, media_name
from tests.llamafactory.helpers import row

MESSAGES = List({"role": Value("string"), "content": Value("string")})
FEATURES = Features(
    {
        "_prompt": MESSAGES,
        "_response": MESSAGES,
        "_system": Value("string"),
        "_tools": Value("string"),
        "_images": List(Image()),
        "_videos": List(Value("string")),
        "_audios": List(Value("string")),
    }
)


def rows_of(size: int) -> list[dict[str, Any]]:
    return [row(f"What is {i}?", f"{i}", images=[f"pictures/{i}.png"]) for i in range(size)]


def arrow(rows: list[dict[str, Any]], features: Features | None = None) -> Dataset:
    """As LLaMA-Factory has them."""
    return Dataset.from_list(rows, features=features)


def png(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Pil.new("RGB", size).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("make", [list, arrow])
def test_a_row_in_words(make: Callable[[Any], Any]) -> None:
    long = "<image><image>\nPlease compare  these pictures, and say which is the larger one."
    rows = make([row("What is 1?", "1"), row(long, "none", images=["a.png", "b.png"], videos=["c.mp4", "d.mp4"])])
    assert describe_row(rows, 0) == 'row 0 of the training split, "What is 1?"'
    text = '"<image><image> Please compare these pict..."'
    assert describe_row(rows, 1) == f"row 1 of the training split, {text}, a.png, b.png, c.mp4 and 1 more"


def test_a_selected_row_also_has_its_place_before_the_selection() -> None:
    split = arrow(rows_of(20)).train_test_split(test_size=5, seed=3)["train"]
    content = split[4]["_response"][0]["content"]
    text = f'row 4 of the training split (row {content} of the loaded data set), "What is {content}?"'
    assert describe_row(split, 4) == f"{text}, pictures/{content}.png"
    assert content != "4"


def test_a_row_without_messages_or_with_odd_ones_has_its_place() -> None:
    empty, odd = row("a", "b"), row("a", "b")
    empty["_prompt"] = empty["_response"] = []
    odd["_prompt"][0]["content"] = 17
    assert describe_row([empty], 0) == "row 0 of the training split"
    assert describe_row([odd], 0) == "row 0 of the training split"
    assert describe_row([odd, {"_prompt": 3}], 1) == "row 1 of the training split"


def test_media_without_a_path_are_named_by_what_they_are() -> None:
    picture = Pil.new("RGB", (30, 20))
    assert media_name({"path": "a.png", "bytes": b"123"}) == "a.png"
    assert media_name({"path": None, "bytes": b"123"}) == media_name(b"123") == "an item of 3 bytes"
    assert media_name(Path("x") / "y.png") == "x/y.png"
    assert media_name(["1.png", "2.png"]) == "1.png and the frames after it"
    assert media_name(picture) == "an image of size (30, 20)"
    assert media_name(None) == "an item of type NoneType"


def test_images_within_a_data_set_are_not_decoded() -> None:
    """An `Image` column decodes on an ordinary access, and fails on what is broken."""
    broken = [row(f"<image>{i}?", "?", images=[{"bytes": b"junk" * (i + 1), "path": None}]) for i in range(3)]
    rows = arrow(broken, FEATURES)
    with pytest.raises(Exception, match="cannot identify image"):
        rows[1]
    assert describe_row(rows, 1) == 'row 1 of the training split, "<image>1?", an item of 8 bytes'
    other = arrow([*broken[:2], row("<image>2?", "?", images=[{"bytes": b"junk", "path": None}])], FEATURES)
    assert fingerprint_rows(rows) == fingerprint_rows(arrow(broken, FEATURES)) != fingerprint_rows(other)


def test_images_in_memory_count_by_their_size() -> None:
    def one(size: tuple[int, int]) -> list[dict[str, Any]]:
        return [row("<image>?", "?", images=[Pil.open(io.BytesIO(png(size)))])]

    assert fingerprint_rows(one((8, 8))) == fingerprint_rows(one((8, 8))) != fingerprint_rows(one((8, 9)))


def changed(change: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    rows = rows_of(20)
    change(rows[7])
    return rows


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "prompt": lambda r: r["_prompt"][0].update(content="What is it?"),
    "response": lambda r: r["_response"][0].update(content="it"),
    "role": lambda r: r["_prompt"][0].update(role="observation"),
    "system": lambda r: r.update(_system="Be brief."),
    "tools": lambda r: r.update(_tools="[]"),
    "image": lambda r: r.update(_images=["pictures/other.png"]),
    "no image": lambda r: r.update(_images=None),
    "video": lambda r: r.update(_videos=["film.mp4"]),
    "frames": lambda r: r.update(_videos=[["1.png", "2.png"]]),
    "audio": lambda r: r.update(_audios=["tone.wav"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_content_has_another_fingerprint(change: Callable[[dict[str, Any]], None]) -> None:
    assert fingerprint_rows(changed(change)) != fingerprint_rows(rows_of(20)) == fingerprint_rows(rows_of(20))


def test_order_and_number_of_rows_count() -> None:
    prints = {fingerprint_rows(rows) for rows in (rows_of(20), rows_of(20)[::-1], rows_of(19), rows_of(1), [])}
    assert len(prints) == 5
    assert fingerprint_rows(rows_of(1000)) != fingerprint_rows(rows_of(1001)[1:])


def test_a_data_set_may_be_moved() -> None:
    def at(folder: str) -> str:
        return fingerprint_rows([row("<image>?", "?", images=[f"{folder}/a.png"])])

    assert at("data/images") == at("elsewhere/images")


def test_the_same_data_have_the_same_fingerprint_in_another_process() -> None:
    code = (
        "from tests.llamafactory.test_rows import *\n"
        "print(fingerprint_rows(arrow(rows_of(300)).train_test_split(test_size=50, seed=1)['train']), end='')"
    )
    one = fingerprint_rows(arrow(rows_of(300)).train_test_split(test_size=50, seed=1)["train"])
    other = fingerprint_rows(arrow(rows_of(300)).train_test_split(test_size=50, seed=2)["train"])
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert shown.stdout == one != other


class Million(list[dict[str, Any]]):
    """As many rows, which note what is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: Any) -> Any:
        self.seen.append(index)
        return row(f"What is {index}?", str(index))


def test_of_a_million_rows_few_are_read_from_begin_to_end() -> None:
    rows = Million()
    fingerprint_rows(rows)
    assert len(rows.seen) == 64
    assert (rows.seen[0], rows.seen[-1]) == (0, 999_999)
    assert max(b - a for a, b in itertools.pairwise(rows.seen)) < 16_000
