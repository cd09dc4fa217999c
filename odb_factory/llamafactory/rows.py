"""Rows of a data set, undecoded: in words by which a user finds one, and as a number by which a data set is known."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

SAMPLED_ROWS = 64
"""Rows that a fingerprint reads, so that it costs the same for a million rows."""

TEXT_SHOWN = 40
MEDIA_SHOWN = 3
MEDIA_COLUMNS = ("_images", "_videos", "_audios")
TEXT_COLUMNS = ("_prompt", "_response", "_system", "_tools")


def describe_row(rows: Any, index: int) -> str:
    """Where row `index` comes from, the beginning of its first message and its first media, on one line."""
    place = f"row {index} of the training split{_origin(rows, index)}"
    try:
        return ", ".join([place, *_beginning(raw_row(rows, index))])
    except Exception:  # the row itself may be what is broken; its place is known all the same
        return place


def _beginning(row: Any) -> list[str]:
    parts = []
    messages = [*(row["_prompt"] or ()), *(row["_response"] or ())]
    content = messages[0]["content"] if messages else None
    if isinstance(content, str):
        text = one_line(content[: 4 * TEXT_SHOWN])
        parts.append(f'"{text[:TEXT_SHOWN]}..."' if len(text) > TEXT_SHOWN else f'"{text}"')
    media = [item for column in MEDIA_COLUMNS for item in row[column] or ()]
    parts += map(media_name, media[:MEDIA_SHOWN])
    if len(media) > MEDIA_SHOWN:
        parts[-1] += f" and {len(media) - MEDIA_SHOWN} more"
    return parts


def fingerprint_rows(rows: Any) -> str:
    """A hash of the number of rows and of the content of up to 64 of them, evenly spread; no media are opened."""
    size = len(rows)
    digest = hashlib.sha256(str(size).encode())
    for index in sampled(size):
        row = raw_row(rows, index)
        content = [[row[column] for column in TEXT_COLUMNS], [_known(row[column]) for column in MEDIA_COLUMNS]]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def sampled(size: int) -> Iterator[int]:
    """Indices of up to `SAMPLED_ROWS` rows of `size`, evenly spread."""
    last = min(size, SAMPLED_ROWS) - 1
    return (i * (size - 1) // max(1, last) for i in range(last + 1))


def media_name(item: Any) -> str:
    """A media item as a user knows it: its path, or its size where it has none."""
    if isinstance(item, str | os.PathLike):
        return os.fspath(item)
    if isinstance(item, dict):
        return item["path"] if item.get("path") else media_name(item.get("bytes"))
    if isinstance(item, bytes):
        return f"an item of {len(item)} bytes"
    if isinstance(item, list) and item:
        return f"{media_name(item[0])} and the frames after it"
    if hasattr(item, "size"):  # an image of PIL
        return getattr(item, "filename", "") or f"an image of size {item.size}"
    return f"an item of type {type(item).__name__}"


def one_line(text: str) -> str:
    """`text` without line breaks, and without halves of letters, which no terminal and no file would take."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


def media_names(items: Iterable[Any]) -> str:
    """Several of them."""
    return ", ".join(map(media_name, items))


def _known(item: Any) -> Any:
    """What identifies media without opening them; the name alone of a file, since a data set may be moved."""
    if isinstance(item, str | os.PathLike):
        return os.path.basename(item)
    if isinstance(item, dict):
        return os.path.basename(item["path"]) if item.get("path") else _known(item.get("bytes"))
    if isinstance(item, list | tuple):
        return [_known(part) for part in item]
    if isinstance(item, bytes):
        return len(item)
    if item is None:
        return None
    return [type(item).__name__, str(getattr(item, "size", "")), str(getattr(item, "mode", ""))]


def raw_row(rows: Any, index: int) -> Any:
    """Row `index` as it is stored: an ordinary access would decode images that are part of a Hugging Face data set."""
    if hasattr(rows, "with_format"):
        return rows.with_format("arrow")[index].to_pylist()[0]
    return rows[index]


def _origin(rows: Any, index: int) -> str:
    """Where LLaMA-Factory selected or shuffled rows, the place before that."""
    mapping = getattr(rows, "_indices", None)
    if mapping is None:
        return ""
    return f" (row {mapping.column(0)[index].as_py()} of the loaded data set)"
