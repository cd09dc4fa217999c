"""Every kind of sample that cannot be used, made of real files, and what must be said of it."""

from __future__ import annotations

import wave
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.llamafactory.conftest import picture, video
from tests.llamafactory.helpers import row

CUTOFF = 96
"""Tokens; the large image and the large video need more."""

UNREADABLE_ROW = "unreadable row"


@dataclass(frozen=True)
class Kind:
    """A kind of bad sample.

    Args:
        name: in the table.
        row: in LLaMA-Factory's aligned format.
        reason: the key under which it is counted.
        cause: regular expression of what is said of it beyond the reason.
        template: `vl` (Qwen3-VL), or `plain`: without media and without tokens of its own.
        bad: False: stock LLaMA-Factory drops it, under either policy.
    """

    name: str
    row: dict[str, Any]
    reason: str
    cause: str
    template: str = "vl"
    bad: bool = True


class Rows(list[dict[str, Any]]):
    """Rows, some of which cannot even be read."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if found["_system"] == UNREADABLE_ROW:
            raise KeyError("_prompt")
        return found


def make_media(folder: Path) -> dict[str, str]:
    """Files by name: whole ones and broken ones."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: folder / name for name in ("small.png", "small.jpg", "large.png")}
    for name, size in (("small.png", (64, 64)), ("small.jpg", (96, 64)), ("large.png", (320, 320))):
        picture(size, seed=size[0]).save(whole[name])
    video(folder / "small.mp4", frames=20, size=(64, 64))
    video(folder / "large.mp4", frames=20, size=(256, 192))
    video(folder / "long.avi", frames=60, size=(64, 64))
    for name, source, share in (
        ("cut.jpg", "small.jpg", 0.5),
        ("cut.png", "small.png", 0.5),
        ("cut.mp4", "small.mp4", 0.5),
        ("cut.avi", "long.avi", 0.5),
    ):
        content = (folder / source).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])
    (folder / "text.jpg").write_text("this is no picture\n" * 20)
    (folder / "garbage.mp4").write_bytes(bytes(range(256)) * 8)
    with wave.open(str(folder / "sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    return {path.name: str(path) for path in folder.iterdir()} | {"gone": str(folder / "gone")}


class _Names(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


def kind_names() -> list[str]:
    """The names of all kinds, without any file."""
    return [kind.name for kind in make_kinds(_Names())]


def make_kinds(media: dict[str, str]) -> list[Kind]:
    """All kinds; each row has another text."""
    kinds = [*_image_kinds(media), *_video_kinds(media), *_text_kinds(media), *_plain_kinds(media)]
    return [replace(kind, row=_numbered(kind.row, number)) for number, kind in enumerate(kinds)]


def _image_kinds(media: dict[str, str]) -> list[Kind]:
    def one(file: str) -> dict[str, Any]:
        return row("<image>What is this?", "a picture", images=[file])

    return [
        Kind("truncated jpg", one(media["cut.jpg"]), "corrupt image", r"cut\.jpg: OSError: image file is truncated"),
        Kind("truncated png", one(media["cut.png"]), "corrupt image", r"cut\.png: OSError: image file is truncated"),
        Kind("text file named .jpg", one(media["text.jpg"]), "corrupt image", r"UnidentifiedImageError: .*text\.jpg"),
        Kind("missing image", one(media["gone"] + ".jpg"), "missing image", r"there is no file \S+gone\.jpg"),
        Kind(
            "second image missing",
            row("<image><image>Compare.", "no", images=[media["small.png"], media["gone"] + ".png"]),
            "missing image",
            r"there is no file \S+gone\.png",
        ),
    ]


def _video_kinds(media: dict[str, str]) -> list[Kind]:
    def one(file: Any) -> dict[str, Any]:
        return row("<video>What is this?", "a film", videos=[file])

    frames = [media["small.jpg"], media["gone"] + ".jpg"]
    decoded = "undecodable video"
    return [
        Kind("garbage mp4", one(media["garbage.mp4"]), decoded, r"InvalidDataError: .*garbage\.mp4"),
        Kind("truncated mp4", one(media["cut.mp4"]), decoded, r"InvalidDataError: .*cut\.mp4"),
        Kind("truncated avi", one(media["cut.avi"]), decoded, "differs from what the file announces"),
        Kind("video without pictures", one(media["sound.mp4"]), decoded, r"sound\.mp4: it holds no video stream"),
        Kind("missing video", one(media["gone"] + ".mp4"), "missing video", r"there is no file \S+gone\.mp4"),
        Kind("missing frame", one(frames), "missing video", r"there is no file \S+gone\.jpg"),
        Kind("corrupt frame", one([media["small.jpg"], media["cut.png"]]), decoded, r"\S+cut\.png: OSError"),
    ]


def _text_kinds(media: dict[str, str]) -> list[Kind]:
    small, large = media["small.png"], media["large.png"]
    unequal, template = "placeholder mismatch", "template error"
    unreadable = row("Can you read me?", "no", system=UNREADABLE_ROW)
    return [
        Kind("content is no text", row("Hello", 17), template, "content of type int instead of text"),  # type: ignore[arg-type]
        Kind("tokenizer error", row("Half a letter: \ud83d", "?"), template, "(TypeError|UnicodeEncodeError)"),
        Kind("broken tools", {**row("Hello", "hi"), "_tools": "{no json"}, template, "RuntimeError: Invalid JSON"),
        Kind(
            "image too many", row("<image>?", "?", images=[small, small]), unequal, "images: 2, <image> in its text: 1;"
        ),
        Kind(
            "image too few", row("<image><image>?", "?", images=[small]), unequal, "images: 1, <image> in its text: 2;"
        ),
        Kind("literal <image>", row("Write <image> here.", "ok"), unequal, "images: 0, <image> in its text: 1;"),
        Kind("literal <video>", row("Write <video> here.", "ok"), unequal, "videos: 0, <video> in its text: 1;"),
        Kind(
            "video too many", row("?", "?", videos=[media["small.mp4"]]), unequal, "videos: 1, <video> in its text: 0;"
        ),
        Kind("literal image token", row("A <|image_pad|>?", "no"), unequal, r"holds a literal <\|image_pad\|>"),
        Kind("cut through an image", row("<image>?", "?", images=[large]), "truncated media", "image tokens .*was cut"),
        Kind(
            "cut through a video",
            row("<video>?", "?", videos=[media["large.mp4"]]),
            "truncated media",
            "video tokens .*was cut",
        ),
        Kind("audio", row("<audio>?", "?", audios=["tone.wav"]), "audio", "has audio, which odb does not support"),
        Kind("row that cannot be read", unreadable, "unreadable", "KeyError: '_prompt'"),
        Kind("invalid conversation", row("Hello", "hi", "Again"), "invalid conversation", "2 prompt and 1", bad=False),
    ]


def _plain_kinds(media: dict[str, str]) -> list[Kind]:
    return [
        Kind("empty sample", row("", ""), "empty", "it has no tokens", "plain"),
        Kind("all labels masked", row("What is this?", ""), "no supervised token", "none of its .* a target", "plain"),
        Kind(
            "media with a text template",
            row("Look.", "yes", images=[media["small.png"]]),
            "media without a multimodal template",
            "does not support image input",
            "plain",
        ),
    ]


def _numbered(bad: dict[str, Any], number: int) -> dict[str, Any]:
    """The row with a number in the text of its first message, so that its description is its own."""
    first, *others = bad["_prompt"]
    if not first["content"]:
        return bad
    return {**bad, "_prompt": [{**first, "content": f"{first['content']} ({number})"}, *others]}


def good_row(number: int, media: dict[str, str] | None = None) -> dict[str, Any]:
    """A valid row; with `media` some have an image or a video."""
    if media is not None and number % 3 == 1:
        return row(f"<image>What is in picture {number}?", "noise", images=[media["small.png"]])
    if media is not None and number % 6 == 2:
        return row(f"<video>What is in film {number}?", "noise", videos=[media["small.mp4"]])
    return row(f"What is {number} + 1?", " ".join(["sum"] * (1 + number % 5)))
