"""The public datasets that we can prepare: where they are published, and how a row becomes a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

IMAGE = "<image>"
PLACEHOLDERS = (IMAGE, "<video>", "<audio>")
"""Strings that LLaMA-Factory replaces by media wherever they occur, even in a text about HTML."""


class Unusable(Exception):
    """A row that cannot be used for training; the message is one of a few fixed reasons."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A converted row."""

    conversations: list[dict[str, str]]
    """Turns with `from` (`system`, `human`, `gpt`) and `value`; human and gpt alternate."""
    images: tuple[str, ...] = ()
    """Published names of the images, one for each `<image>`."""


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
    """The turns of a row: at most one system turn, then human and gpt alternating, gpt last, none of them empty."""
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
    """False for lone surrogates, for which the JSON reader of `datasets` would reject the whole file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A published dataset."""

    title: str
    name: str
    """Its name in `dataset_info.json`, which the recipes use."""
    repository: str
    """On the Hugging Face Hub."""
    revision: str | None
    """None: the newest. File names with hashes are valid for one revision only."""
    files: tuple[str, ...]
    columns: tuple[str, ...]
    """Columns that Parquet files must have; `id_column` is read if it is there."""
    converter: Converter
    rows: int
    """Approximate number of published rows; only for the progress bar."""
    local: str
    """A description of a local copy, for the end of a sentence."""
    local_files: str
    """Glob pattern for its row files."""
    id_column: str = "id"
    """The column that identifies a row, beside its number."""
    archive: str | None = None
    """A zip file with the images, in the same repository."""
    images_url: str | None = None
    """Base URL of single images."""
    image_folders: tuple[str, ...] = ()
    """Image folders in a local copy, beside the folder itself."""
    image_archives: tuple[str, ...] = ()
    """Zip files of images in a local copy."""
    recipes: str = ""

    @property
    def has_images(self) -> bool:
        """Whether each row has an image."""
        return bool(self.archive or self.images_url)


SETS = {
    "ultrachat": PublicSet(
        title="UltraChat 200K",
        name="ultrachat_200k",
        repository="HuggingFaceH4/ultrachat_200k",
        revision="8049631c405ae6576f93f445c6b8166f76f5505a",
        files=(
            "data/train_sft-00000-of-00003-a3ecf92756993583.parquet",
            "data/train_sft-00001-of-00003-0a1804bcb6ae68c6.parquet",
            "data/train_sft-00002-of-00003-ee46ed25cfae92c6.parquet",
        ),
        columns=("messages",),
        converter=ultrachat,
        rows=207_865,
        id_column="prompt_id",
        local="a folder with its train_sft-*.parquet, or a .parquet or .jsonl file with a column messages",
        local_files="train_sft-*.parquet",
        recipes="ultrachat",
    ),
    "llava": PublicSet(
        title="LLaVA-Instruct 150K",
        name="llava_150k",
        repository="liuhaotian/LLaVA-Instruct-150K",
        revision=None,
        files=("llava_instruct_150k.json",),
        columns=("image", "conversations"),
        converter=llava,
        rows=157_712,
        local="a folder with llava_instruct_150k.json and COCO's images, as train2017/ or train2017.zip",
        local_files="llava_instruct_150k.json",
        images_url="http://images.cocodataset.org/train2017/",
        image_folders=("train2017", "coco/train2017", "images", "images/train2017"),
        image_archives=("train2017.zip", "images.zip"),
        recipes="llava",
    ),
    "sharegpt4o": PublicSet(
        title="ShareGPT-4o image captions",
        name="sharegpt4o_57k",
        repository="OpenGVLab/ShareGPT-4o",
        revision=None,
        files=("image_conversations/gpt-4o.jsonl",),
        columns=("image", "conversations"),
        converter=sharegpt4o,
        rows=57_289,
        id_column="image",
        local="a folder with image_conversations/gpt-4o.jsonl and the images, as images/ or images.zip",
        local_files="gpt-4o.jsonl",
        archive="images.zip",
        image_folders=("images", "image", "mnt/petrelfs/wangwenhai/workspace_cef/4o/image"),
        image_archives=("images.zip",),
        recipes="sharegpt4o",
    ),
}
"""By the name that the command accepts."""
