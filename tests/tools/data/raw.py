"""Small raw files in the schemas in which the datasets are published."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

INSIDE_ZIP = "mnt/petrelfs/wangwenhai/workspace_cef/4o/image"
"""Where ShareGPT-4o's images lie in its archive."""


def ultrachat_row(number: int, turns: int = 2, **changes: Any) -> dict[str, Any]:
    """A row of UltraChat 200K with `turns` questions."""
    messages = []
    for turn in range(turns):
        messages.append({"content": f"Question {number}.{turn}: why é and 你?", "role": "user"})
        messages.append({"content": f"Answer {number}.{turn}. " * (1 + number % 5), "role": "assistant"})
    return {"prompt": messages[0]["content"], "prompt_id": f"id-{number:05d}", "messages": messages, **changes}


def llava_row(number: int, **changes: Any) -> dict[str, Any]:
    """A row of LLaVA-Instruct-150K; three rows share an image, the placeholder stands before or behind."""
    image = f"{number // 3:012d}"
    ask = f"<image>\nWhat is seen in {number}?" if number % 2 else f"What is seen in {number}?\n<image>"
    conversations = [{"from": "human", "value": ask}, {"from": "gpt", "value": f"Shape {number}."}]
    conversations += [{"from": "human", "value": "And else?"}, {"from": "gpt", "value": "Nothing. " * (1 + number % 4)}]
    return {"id": image, "image": f"{image}.jpg", "conversations": conversations, **changes}


def sharegpt4o_row(number: int, **changes: Any) -> dict[str, Any]:
    """A row of ShareGPT-4o's captions; every second one comes without a placeholder."""
    ask = "<image>\nDescribe this in detail." if number % 2 else "Describe this in detail."
    conversations = [{"from": "human", "value": ask}, {"from": "gpt", "value": f"A picture, number {number}. " * 4}]
    return {"image": f"{number}.jpg", "width": 48, "height": 32, "conversations": conversations, **changes}


def jpeg(seed: int, size: tuple[int, int] = (96, 64)) -> bytes:
    """A small photograph-like image."""
    from PIL import Image

    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    picture.paste((seed * 37 % 256, seed * 91 % 256, seed * 13 % 256), (0, 0, size[0] // 2, size[1]))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    return buffer.getvalue()


def write_ultrachat(folder: Path, rows: Sequence[dict[str, Any]], shards: int = 3) -> Path:
    """The rows as Parquet files with the published names."""
    import pyarrow
    from pyarrow.parquet import write_table

    message = pyarrow.struct([("content", pyarrow.string()), ("role", pyarrow.string())])
    columns = [("prompt", pyarrow.string()), ("prompt_id", pyarrow.string()), ("messages", pyarrow.list_(message))]
    (folder / "data").mkdir(parents=True)
    each = -(-len(rows) // shards)
    for shard in range(shards):
        table = pyarrow.Table.from_pylist(rows[shard * each : (shard + 1) * each], pyarrow.schema(columns))
        write_table(table, folder / "data" / f"train_sft-{shard:05d}-of-{shards:05d}-0123456789abcdef.parquet")
    return folder


def write_llava(folder: Path, rows: Sequence[Any], images: Iterable[str]) -> Path:
    """The rows as one JSON list, the images in train2017."""
    (folder / "train2017").mkdir(parents=True)
    (folder / "llava_instruct_150k.json").write_text(json.dumps(rows), encoding="utf-8")
    for number, name in enumerate(sorted(images)):
        (folder / "train2017" / name).write_bytes(jpeg(number))
    return folder


def write_sharegpt4o(folder: Path, lines: Sequence[str], images: Iterable[str]) -> Path:
    """The lines as they are, the images in an archive with the published folders."""
    (folder / "image_conversations").mkdir(parents=True)
    (folder / "image_conversations" / "gpt-4o.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number, name in enumerate(sorted(images)):
            archive.writestr(f"{INSIDE_ZIP}/{name}", jpeg(number))
    return folder


def lines_of(path: Path) -> list[Any]:
    """The items of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
