"""The converters, row by row: what they keep, and what they refuse and why."""

from __future__ import annotations

from typing import Any

import pytest

from odb_factory.tools.data.sets import Unusable, llava, sharegpt4o, ultrachat
from tests.tools.data.raw import llava_row, sharegpt4o_row, ultrachat_row


def test_ultrachat() -> None:
    sample = ultrachat(ultrachat_row(3, turns=2))
    assert [turn["from"] for turn in sample.conversations] == ["human", "gpt"] * 2
    assert sample.conversations[0]["value"] == "Question 3.0: why é and 你?"
    assert sample.images == ()


def test_a_system_turn_is_kept() -> None:
    row = ultrachat_row(0, turns=1)
    row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    assert [turn["from"] for turn in ultrachat(row).conversations] == ["system", "human", "gpt"]


@pytest.mark.parametrize("number", [0, 1])
def test_llava_keeps_the_place_of_the_image(number: int) -> None:
    row = llava_row(number)
    sample = llava(row)
    assert sample.conversations == row["conversations"]
    assert sample.images == ("000000000000.jpg",)


def test_sharegpt4o_gets_the_placeholder_that_it_lacks() -> None:
    assert sharegpt4o(sharegpt4o_row(1)).conversations[0]["value"] == "<image>\nDescribe this in detail."
    assert sharegpt4o(sharegpt4o_row(2)).conversations[0]["value"] == "<image>\nDescribe this in detail."
    assert "<image>" not in sharegpt4o_row(2)["conversations"][0]["value"]  # the raw row is not changed


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"prompt_id": "x", "messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "not an object"),
        ({}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": "hello"}, "no messages"),
        ({"messages": ["hello"]}, "turn that is not an object"),
        (chat(("user", "a"), ("assistant", None)), "turn without text"),
        (chat(("user", "a"), ("assistant", " \n")), "empty turn"),
        (chat(("user", "a"), ("tool", "b")), "unknown role"),
        (chat(("user", "a"), (None, "b")), "unknown role"),
        (chat(("assistant", "a"), ("user", "b")), "turns that do not alternate, the user first"),
        (chat(("user", "a"), ("user", "b")), "turns that do not alternate, the user first"),
        (chat(("user", "a"), ("system", "b")), "turns that do not alternate, the user first"),
        (chat(("user", "a"), ("assistant", "b"), ("user", "c")), "no answer at the end"),
        (chat(("system", "a")), "no answer at the end"),
        (chat(("user", "What is <image> in HTML?"), ("assistant", "b")), "text with a literal <image>"),
        (chat(("user", "a"), ("assistant", "use <video>")), "text with a literal <image>"),
        (chat(("user", "half a letter: \ud83d"), ("assistant", "b")), "text that is not valid Unicode"),
    ],
)
def test_ultrachat_refuses(row: Any, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        ultrachat(row)


@pytest.mark.parametrize("converter", [llava, sharegpt4o])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": None}, "no image"),
        ({"image": "/etc/a.jpg"}, "image name that leaves the folder"),
        ({"image": "../a.jpg"}, "image name that leaves the folder"),
        ({"conversations": None}, "no conversations"),
        ({"ask": "<image> or <image>?"}, "more than one <image> for one image"),
        ({"ask": "what?", "answer": "see <image>"}, "<image> in an answer"),
        ({"ask": "<image>", "answer": "see <audio>"}, "text with a literal <video> or <audio>"),
    ],
)
def test_rows_with_images_that_are_refused(converter: Any, changes: dict[str, Any], reason: str) -> None:
    row = llava_row(0)
    if "ask" in changes:
        row["conversations"] = [
            {"from": "human", "value": changes["ask"]},
            {"from": "gpt", "value": changes.get("answer", "yes")},
        ]
    else:
        row.update(changes)
    with pytest.raises(Unusable, match=reason):
        converter(row)


def test_a_question_that_is_only_the_image_is_kept() -> None:
    row = llava_row(1, conversations=[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}])
    assert llava(row).conversations[0]["value"] == "<image>"
