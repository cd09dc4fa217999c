"""The two data sets: real conversations, and drawn JPEG images of various sizes; and their models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.sharegpt import DATASET as CONVERSATIONS
from benchmarks.sharegpt import read_conversations, write_dataset

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = "drawn_images"
TEXT_CUTOFF = 2048
VOCABULARY = 8192
"""First so many tokens of Qwen's tokenizer: logits of its 151,643 would be most of the time and memory of a step."""

SIDES = (240, 2400)
"""Width and height of images (pixels) are between these, most of them small."""
MAX_PIXELS = 65_536
IMAGE_CUTOFF = 256


def make_text(place: Path, conversations: int | None, seed: int) -> int:
    """Write `place/model` and `place/data`; all usable conversations for None. Returns their number."""
    from benchmarks.qwen_tokenizer import make_qwen_tokenizer
    from benchmarks.train.setup import Size, make_model

    chosen = read_conversations(conversations)
    write_dataset(chosen, place / "data")
    size = Size(
        conversations=len(chosen),
        held_out=0,
        cutoff=TEXT_CUTOFF,
        batch_size=1,
        vocabulary=VOCABULARY,
        hidden=64,
        layers=1,
    )
    make_model(place / "model", make_qwen_tokenizer(VOCABULARY), size, seed)
    return len(chosen)


def make_images(place: Path, count: int, seed: int) -> int:
    """Write `place/model`, a tiny Qwen3-VL, and `place/data` with a question about each image. Returns their number."""
    from odb_factory.tools.demo import make_vl_model

    rng = random.Random(f"first_step/{seed}")
    folder = place / "data" / "images"
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        width, height = (round(SIDES[0] * (SIDES[1] / SIDES[0]) ** rng.betavariate(2, 2.5)) for _ in range(2))
        draw_image(rng, width, height).save(folder / f"{number:05d}.jpg", quality=88)
        turns = [
            {"from": "human", "value": "<image>Which numbers stand for this picture?"},
            {"from": "gpt", "value": " ".join(str(rng.randrange(100)) for _ in range(rng.randint(1, 40)))},
        ]
        rows.append({"conversations": turns, "images": [f"images/{number:05d}.jpg"]})
    (place / "data" / f"{IMAGES}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    entry = {
        "file_name": f"{IMAGES}.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "images": "images"},
    }
    (place / "data" / "dataset_info.json").write_text(json.dumps({IMAGES: entry}, indent=2) + "\n", encoding="utf-8")
    make_vl_model(place / "model", seed=seed)
    return count


def draw_image(rng: random.Random, width: int, height: int) -> Image:
    """Soft colours with fine noise and shapes on them: JPEG has about as much to do as with a photograph."""
    from PIL import Image, ImageDraw

    cells = bytes(rng.randrange(256) for _ in range(3 * 8 * 8))
    image = Image.frombytes("RGB", (8, 8), cells).resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.frombytes("L", (width, height), rng.randbytes(width * height)).convert("RGB")
    image = Image.blend(image, noise, 0.12)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(width), rng.randrange(height)
        colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        pen.ellipse((x, y, x + rng.randint(8, width // 3), y + rng.randint(8, height // 3)), fill=colour)
    return image


def recipe(kind: str, place: Path, output: Path, seed: int) -> dict[str, Any]:
    """The recipe of Standard. Text: one update; images: an epoch."""
    values: dict[str, Any] = {
        "model_name_or_path": str(place / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(place / "data"),
        "dataloader_num_workers": 1,
        "learning_rate": 1.0e-3,
        "seed": seed,
        "use_cpu": True,
        "output_dir": str(output),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    if kind == "text":
        text = {"template": "qwen3_nothink", "cutoff_len": TEXT_CUTOFF, "per_device_train_batch_size": 2}
        return values | text | {"dataset": CONVERSATIONS, "max_steps": 1}
    images = {"template": "qwen3_vl_nothink", "cutoff_len": IMAGE_CUTOFF, "per_device_train_batch_size": 4}
    images |= {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "image_max_pixels": MAX_PIXELS}
    return values | images | {"dataset": IMAGES, "num_train_epochs": 1}
