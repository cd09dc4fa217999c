"""A published row to a conversation in LLaMA-Factory's `sharegpt` format. Pure: no file is opened here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

IMAGE = "<image>"
PLACEHOLDERS = (IMAGE, "<video>", "<audio>")
"""Strings that LLaMA-Factory replaces by media wherever they stand, also where somebody only wrote about HTML."""


class Unusable(Exception):
    """A row that cannot be trained on; the text is the reason, the same for every row of its kind."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A converted row."""

    conversations: list[dict[str, str]]
    """Turns with `from` (`system`, `human`, `gpt`) and `value`, human and gpt in turn."""
    images: tuple[str, ...] = ()
    """Names of the images as published, one for each `<image>`."""


Converter = Callable[[Mapping[str, Any]], Sample]


def ultrachat(row: Mapping[str, Any]) -> Sample:
    """A row of UltraChat 200K: `messages`, a list of `{role, content}` with the roles user and assistant.

    Schema: the card of HuggingFaceH4/ultrachat_200k (columns prompt, prompt_id, messages; split train_sft).
    """
    turns = _turns(row, "messages", "role", "content", {"system": "system", "user": "human", "assistant": "gpt"})
    if any(mark in turn["value"] for turn in turns for mark in PLACEHOLDERS):
        raise Unusable("text with a literal <image>, <video> or <audio>")
    return Sample(turns)


def llava(row: Mapping[str, Any]) -> Sample:
    """A row of LLaVA-Instruct-150K: `id`, `image` (a file of COCO train2017) and `conversations` of `{from, value}`.

    Schema: llava_instruct_150k.json of liuhaotian/LLaVA-Instruct-150K as LLaVA's own docs/Data.md describes it; the
    first or last line of the first human turn is `<image>`.
    """
    return _about_image(row)


def sharegpt4o(row: Mapping[str, Any]) -> Sample:
    """A row of ShareGPT-4o's image captions: `image` (a file of images.zip), `width`, `height`, `conversations`.

    Schema: image_conversations/gpt-4o.jsonl of OpenGVLab/ShareGPT-4o (configuration image_caption, split images) as
    public loaders read it; not every copy has `<image>` in the human turn, so a missing one is put in front of it.
    """
    return _about_image(row)


def _about_image(row: Mapping[str, Any]) -> Sample:
    turns = _turns(row, "conversations", "from", "value", {"system": "system", "human": "human", "gpt": "gpt"})
    name = row.get("image")
    if not isinstance(name, str) or not name:
        raise Unusable("no image")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise Unusable("image name that leaves the folder")
    if "\0" in name or not _is_unicode(name):
        raise Unusable("image name that no file can have")
    asked = [turn for turn in turns if turn["from"] == "human"]
    marks = sum(turn["value"].count(IMAGE) for turn in turns)
    if any(mark in turn["value"] for turn in turns for mark in PLACEHOLDERS if mark != IMAGE):
        raise Unusable("text with a literal <video> or <audio>")
    if marks == 0:
        asked[0]["value"] = f"{IMAGE}\n{asked[0]['value']}"
    elif marks > 1:
        raise Unusable("more than one <image> for one image")
    elif not any(IMAGE in turn["value"] for turn in asked):
        raise Unusable("<image> in an answer")
    return Sample(turns, (name,))


def _turns(
    row: Mapping[str, Any], column: str, role_key: str, text_key: str, roles: Mapping[str, str]
) -> list[dict[str, str]]:
    """The turns of a row: at most one system turn, then human and gpt in turn, gpt last, none of them empty."""
    if not isinstance(row, Mapping):
        raise Unusable("not an object")
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise Unusable(f"no {column}")
    turns = [_turn(message, role_key, text_key, roles) for message in messages]
    dialogue = turns[1:] if turns[0]["from"] == "system" else turns
    if any(turn["from"] != ("human", "gpt")[i % 2] for i, turn in enumerate(dialogue)):
        raise Unusable("turns that do not alternate, the user first")
    if not dialogue or len(dialogue) % 2:
        raise Unusable("no answer at the end")
    return turns


def _turn(message: Any, role_key: str, text_key: str, roles: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise Unusable("turn that is not an object")
    role, text = message.get(role_key), message.get(text_key)
    if not isinstance(role, str) or role not in roles:
        raise Unusable("unknown role")
    if not isinstance(text, str):
        raise Unusable("turn without text")
    if not text.replace(IMAGE, "").strip() and not (IMAGE in text and roles[role] == "human"):
        raise Unusable("empty turn")
    if not _is_unicode(text):
        raise Unusable("text that is not valid Unicode")
    return {"from": roles[role], "value": text}


def _is_unicode(text: str) -> bool:
    """False with half a letter, for which the JSON reader of `datasets` would refuse the whole file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
