"""The demo's conversations: pictures drawn with Pillow, questions about them, and text-only tasks of all lengths."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from pathlib import Path
from statistics import NormalDist

from PIL import Image, ImageDraw

# These are also names that Pillow knows.
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "black", "pink", "grey", "cyan")
# Each outline in a unit square.
SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": tuple((0.5 + 0.5 * math.cos(0.25 * i), 0.5 + 0.5 * math.sin(0.25 * i)) for i in range(25)),
    "square": ((0, 0), (1, 0), (1, 1), (0, 1)),
    "triangle": ((0.5, 0), (1, 1), (0, 1)),
    "diamond": ((0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)),
    "hourglass": ((0, 0), (1, 0), (0, 1), (1, 1)),
}
NOUNS = {"bar": "bar", "pie": "slice", "line": "point"}
_WORD_LIST = (
    "apple autumn basket bread bridge butter café candle castle circus cloud coffee cotton desert door dragon eagle "
    "engine farmer field finger flower forest garden ginger guitar hammer house island jacket jungle kettle kitchen "
    "lemon letter market mirror monkey mountain naïve needle number ocean paper pencil piano queen rabbit river rocket "
    "saddle school silver stone summer table ticket tunnel valley village violin wagon window winter zebra Zürich 東京"
)
WORDS = tuple(_WORD_LIST.split())
# A sample's aimed length in tokens: log-normal, so that most are short and a few are very long.
LENGTHS = NormalDist(math.log(105), 0.95)
SHORTEST, LONGEST = 20, 860
# Below this aim a picture gets short questions, above it a description.
DESCRIBE_FROM = 115


@dataclass(frozen=True)
class Mark:
    """One thing in a picture: a shape at a row and column of a grid, or the chart's ``column``-th value."""

    colour: str
    shape: str
    row: int
    column: int
    value: int = 0


@dataclass(frozen=True)
class Picture:
    """A picture still to be drawn, ``width`` by ``height`` pixels; ``kind`` is grid, bar, pie or line."""

    kind: str
    width: int
    height: int
    rows: int
    columns: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Sample:
    """One conversation: user and assistant turns by turns, with one ``<image>`` in them for each picture."""

    turns: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()


def make_data(path: Path, samples: int, seed: int) -> dict[str, int]:
    """Write ``odb_demo``, ``odb_demo_text`` and ``odb_demo_eval`` with their ``dataset_info.json`` to ``path``.

    The first two hold ``samples`` conversations each, the held-out one a tenth of that (8 or more). The same
    arguments write the same bytes. Returns ``odb_demo``'s counts: samples, one_image, several_images, text_only, and
    the other sets' sizes as text_samples and eval_samples. Raises ValueError for fewer than 8 samples.
    """
    if samples < 8:
        raise ValueError(f"A demo needs at least 8 samples, but {samples} were asked for: pass samples=8 or more.")
    train = build_samples(samples, seed)
    sets = {
        "odb_demo": train,
        "odb_demo_text": build_samples(samples, seed, split="text", text_only=True),
        "odb_demo_eval": build_samples(max(8, samples // 10), seed, split="eval", unlike=train),
    }
    (path / "images").mkdir(parents=True, exist_ok=True)
    for name, chosen in sets.items():
        rows = [_write_sample(path, f"{name}-{index:05d}", sample) for index, sample in enumerate(chosen)]
        (path / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    columns = {"messages": "conversations", "images": "images"}
    info = {name: {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns} for name in sets}
    info["odb_demo_text"]["columns"] = {"messages": "conversations"}  # text needs no processor
    (path / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    pictures = [len(sample.pictures) for sample in train]
    return {
        "samples": samples,
        "one_image": pictures.count(1),
        "several_images": samples - pictures.count(0) - pictures.count(1),
        "text_only": pictures.count(0),
        "text_samples": len(sets["odb_demo_text"]),
        "eval_samples": len(sets["odb_demo_eval"]),
    }


def build_samples(
    count: int, seed: int, *, split: str = "train", text_only: bool = False, unlike: Collection[Sample] = ()
) -> list[Sample]:
    """Make ``count`` samples, none of them in ``unlike``: 55 % one picture, 10 % several, 35 % text (or all text)."""
    taken = set(unlike)
    rng = random.Random(f"odb-demo/{seed}/{split}")
    several, text = (0, count) if text_only else (round(count * 0.10), round(count * 0.35))
    plan = []
    for make, share in ((_one_picture, count - several - text), (_several_pictures, several), (_text, text)):
        # Evenly spaced quantiles give even a small demo its long tail.
        aims = (math.exp(LENGTHS.inv_cdf((index + 0.5) / share)) for index in range(share))
        plan += [(make, round(min(LONGEST, max(SHORTEST, aim)))) for aim in aims]
    rng.shuffle(plan)
    samples = []
    for make, aim in plan:
        while (sample := make(rng, aim)) in taken:
            aim = min(LONGEST, aim + 5)  # longer ones are more various, so this ends however many are taken
        samples.append(sample)
    return samples


def draw(picture: Picture) -> Image.Image:
    """Draw the picture in RGB at its own size."""
    image = Image.new("RGB", (picture.width, picture.height), "white")
    drawers = {"grid": _draw_grid, "bar": _draw_bars, "pie": _draw_pie, "line": _draw_line}
    drawers[picture.kind](ImageDraw.Draw(image), picture)
    return image


def _write_sample(path: Path, name: str, sample: Sample) -> dict[str, object]:
    files = [f"images/{name}-{index}.png" for index in range(len(sample.pictures))]
    for file, picture in zip(files, sample.pictures, strict=True):
        draw(picture).save(path / file)
    turns = [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(sample.turns)]
    return {"conversations": turns, "images": files}


def _draw_grid(pen: ImageDraw.ImageDraw, picture: Picture) -> None:
    cell = min(picture.width / picture.columns, picture.height / picture.rows)
    side = 0.76 * cell
    for mark in picture.marks:
        left, top = (mark.column + 0.12) * cell, (mark.row + 0.12) * cell
        pen.polygon([(left + x * side, top + y * side) for x, y in SHAPES[mark.shape]], fill=mark.colour)


def _draw_bars(pen: ImageDraw.ImageDraw, picture: Picture) -> None:
    step, unit, floor = picture.width / picture.columns, (picture.height - 6) / 12, picture.height - 3
    for mark in picture.marks:
        left = (mark.column + 0.1) * step
        pen.rectangle((left, floor - mark.value * unit, left + 0.8 * step, floor), fill=mark.colour)
    pen.line((0, floor, picture.width, floor), fill="black", width=2)


def _draw_pie(pen: ImageDraw.ImageDraw, picture: Picture) -> None:
    side, start, whole = min(picture.width, picture.height) - 4, -90.0, sum(mark.value for mark in picture.marks)
    for mark in picture.marks:
        end = start + 360 * mark.value / whole
        pen.pieslice((2, 2, side, side), start, end, fill=mark.colour, outline="white")
        start = end


def _draw_line(pen: ImageDraw.ImageDraw, picture: Picture) -> None:
    step, unit = picture.width / picture.columns, (picture.height - 16) / 12
    spots = [((mark.column + 0.5) * step, picture.height - 6 - mark.value * unit) for mark in picture.marks]
    pen.line(spots, fill=(90, 90, 90), width=2)
    for (x, y), mark in zip(spots, picture.marks, strict=True):
        pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=mark.colour)


def _picture(rng: random.Random, kind: str, tokens: float) -> Picture:
    """A random picture that takes about ``tokens`` image tokens, each of them 32 x 32 pixels."""
    area, aspect = min(100.0, max(3.0, tokens)) * 32 * 32, rng.uniform(0.65, 1.5)
    width, height = (round(min(320, max(48, math.sqrt(area * ratio)))) for ratio in (aspect, 1 / aspect))
    if kind == "grid":
        rows, columns = max(1, height // 38), max(1, width // 38)
        cells = [(row, column) for row in range(rows) for column in range(columns) if rng.random() < 0.85]
        marks = [Mark(rng.choice(COLOURS), rng.choice(tuple(SHAPES)), *cell) for cell in cells or [(0, 0)]]
    else:
        rows, columns = 1, min(10, max(2, width // 26))
        colours = rng.sample(COLOURS, columns)
        values = rng.sample(range(1, 13), columns)  # all different, so that "largest" has one answer
        marks = [Mark(colours[i], NOUNS[kind], 0, i, values[i]) for i in range(columns)]
    return Picture(kind, width, height, rows, columns, tuple(marks))


def _ask(rng: random.Random, picture: Picture) -> tuple[str, str]:
    """A question about the picture, and its answer of a word or two."""
    mark = rng.choice(picture.marks)
    if picture.kind == "grid":
        colours, shapes = [other.colour for other in picture.marks], [other.shape for other in picture.marks]
        questions = [
            (f"How many shapes are {mark.colour}?", str(colours.count(mark.colour))),
            (f"How many {mark.shape} shapes are there?", str(shapes.count(mark.shape))),
            (f"What is in row {mark.row + 1} column {mark.column + 1}?", f"{mark.colour} {mark.shape}"),
        ]
        return rng.choice(questions)
    noun, ranked = mark.shape, sorted(picture.marks, key=lambda other: other.value)
    before, after = rng.choice(list(pairwise(picture.marks)))
    questions = [
        (f"Which colour is the largest {noun}?", ranked[-1].colour),
        (f"Which colour is the smallest {noun}?", ranked[0].colour),
        (f"How many {noun}s are there?", str(picture.columns)),
        (f"Which colour comes after {before.colour}?", after.colour),
    ]
    if picture.kind != "pie":
        questions.append((f"What is the value of the {mark.colour} {noun}?", str(mark.value)))
    return rng.choice(questions)


def _describe(picture: Picture, aim: float) -> str:
    """The picture in words: all of its marks, and for a chart comparisons until ``aim`` tokens are full."""
    if picture.kind == "grid":
        return "\n".join(f"row {m.row + 1} column {m.column + 1} {m.colour} {m.shape}" for m in picture.marks)
    ranked = sorted(picture.marks, key=lambda mark: -mark.value)
    lines = [f"{place + 1} is {mark.colour}" for place, mark in enumerate(ranked)]
    for one, other in islice(combinations(picture.marks, 2), max(0, round((aim - 7 * len(lines)) / 8))):
        lines.append(f"{one.colour} is {'larger' if one.value > other.value else 'smaller'} than {other.colour}")
    return "\n".join(lines)


def _one_picture(rng: random.Random, aim: int) -> Sample:
    if aim < DESCRIBE_FROM:
        picture = _picture(rng, rng.choice(("grid", *NOUNS)), rng.uniform(0.35, 1.0) * (aim - 28))
        # What the picture leaves of the aim goes to further questions about it.
        asked = 1 + max(0, aim - 30 - round(picture.width * picture.height / 1024)) // 26
        turns = [text for _ in range(asked) for text in _ask(rng, picture)]
    else:
        chart = aim < 450 and rng.random() < 0.5
        picture = _picture(rng, rng.choice(tuple(NOUNS)) if chart else "grid", aim / (5 if chart else 7.5))
        question = "Rank and compare all the marks." if chart else "List all the shapes with their positions."
        turns = [question, _describe(picture, aim - picture.width * picture.height / 1024 - 30)]
    turns[0] = rng.choice(("<image>{}", "<image>\n{}", "{}\n<image>")).format(turns[0])
    return Sample(tuple(turns), (picture,))


def _several_pictures(rng: random.Random, aim: int) -> Sample:
    count = 2 if aim < 70 else rng.randint(2, 4)
    if aim < 1.5 * DESCRIBE_FROM:
        pictures = [_picture(rng, "grid", rng.uniform(0.5, 1.5) * (aim - 40) / count) for _ in range(count)]
        shapes = [len(picture.marks) for picture in pictures]
        turns = ["How many shapes are in all the pictures?", str(sum(shapes))]
        if shapes.count(max(shapes)) == 1 and rng.random() < 0.7:
            turns = ["Which picture has the most shapes?", f"picture {shapes.index(max(shapes)) + 1}"]
    else:
        share = 0.85 * (aim - 40) / count
        pictures = [_picture(rng, rng.choice(("grid", *NOUNS)), share / 6.4) for _ in range(count)]
        texts = [f"picture {place + 1}\n{_describe(picture, share)}" for place, picture in enumerate(pictures)]
        turns = ["Describe every picture.", "\n".join(texts)]
    turns[0] = "<image>" * count + turns[0]
    return Sample(tuple(turns), tuple(pictures))


def _text(rng: random.Random, aim: int) -> Sample:
    if aim < 45:
        first, second = rng.randint(1, 20), rng.randint(1, 20)
        return Sample((f"What is {first} + {second}?", str(first + second)))
    make = rng.choice((_text_list if aim < 350 else _text_count, _text_chat, _text_table))
    return Sample(tuple(make(rng, aim)))


def _text_list(rng: random.Random, aim: int) -> list[str]:
    kind = rng.choice(("words", "words", "numbers"))
    if kind == "words":
        items = [rng.choice(WORDS) for _ in range(max(2, (aim - 20) // 3))]
    else:
        items = [str(rng.randint(10, 99)) for _ in range(max(2, (aim - 20) // 6))]
    done = {"Copy": items, "Reverse": items[::-1], "Sort": sorted(items)}
    task = rng.choice(tuple(done))
    return [f"{task} these {kind}: {' '.join(items)}", " ".join(done[task])]


def _text_count(rng: random.Random, aim: int) -> list[str]:
    first, step, terms = rng.randint(1, 9), rng.randint(1, 5), (aim - 30) // 4
    numbers = range(first, first + step * terms, step)
    return [f"Count from {first} in steps of {step}, {terms} numbers.", " ".join(map(str, numbers))]


def _text_chat(rng: random.Random, aim: int) -> list[str]:
    total = rng.randint(1, 9)
    turns = [f"The total is {total}.", "ok"]
    for _ in range(max(1, (aim - 22) // 21)):
        step = rng.randint(1, 9)
        total += step
        turns += [f"Add {step}.", f"The total is {total}."]
    return turns


def _text_table(rng: random.Random, aim: int) -> list[str]:
    rows = [(rng.choice(WORDS), rng.choice(COLOURS), rng.randint(1, 9)) for _ in range(max(2, aim // 16))]
    table = "\n".join(f"| {word} | {colour} | {number} |" for word, colour, number in rows)
    if rng.random() < 0.3:
        word, *_ = rng.choice(rows)
        return [f"{table}\nWhich colour is the first {word}?", next(row[1] for row in rows if row[0] == word)]
    return [f"{table}\nSay the table in words.", "\n".join(f"{n} {colour} {word}" for word, colour, n in rows)]
