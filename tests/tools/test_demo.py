"""The demo: what it writes is complete, loads without a network, and has the long tail it promises."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from odb_factory.tools.demo.data import build_samples, make_data
from odb_factory.tools.demo.make import DemoPaths, make_demo
from odb_factory.tools.demo.model import make_text_model
from odb_factory.tools.demo.tokenizer import CONTROL_TOKENS, VISIBLE_TOKENS, VOCAB_SIZE, make_tokenizer

SETS = ("odb_demo", "odb_demo_text", "odb_demo_eval")
SAMPLES = 120
TEXTS = [
    "plain text, 12 + 30 = 42",
    "  two  spaces\tand\r\na line\n\n",
    "décomposé e\u0301 and composed é",
    "東京 жук שלום नमस्ते",
    "👩🏽‍🚀 \u200b \ufffd \x00 \U0010ffff",
    "<|im_start|>user\n<|image_pad|><think>x</think><|im_end|>",
    "<image> <video>",
]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # The environment variable is read once, at the first import of huggingface_hub anywhere in the session.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return make_demo(tmp_path_factory.mktemp("demo") / "made", samples=SAMPLES)


@pytest.fixture(scope="module")
def processor(demo: DemoPaths) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(demo.model)


def read(directory: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def as_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]


def observed_length(demo: DemoPaths, processor: Any, row: dict[str, Any]) -> int:
    """The sample's tokens as stock LLaMA-Factory makes them, picture placeholders expanded."""
    from llamafactory.data.template import TEMPLATES

    template = TEMPLATES["qwen3_vl_nothink"]
    images = [str(demo.data / file) for file in row["images"]]
    messages = template.mm_plugin.process_messages(as_messages(row), images, [], [], processor)
    pairs = template.encode_multiturn(processor.tokenizer, messages, None, None)
    return sum(len(question) + len(answer) for question, answer in pairs)


def test_import_is_light() -> None:
    code = (
        "import sys, odb_factory.tools.demo; heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_auto_classes_load_the_model(demo: DemoPaths, processor: Any) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    config = AutoConfig.from_pretrained(demo.model)
    model = AutoModelForImageTextToText.from_pretrained(demo.model)
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    assert config.model_type == "qwen3_vl"
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert type(processor.video_processor).__name__ == "Qwen3VLVideoProcessor"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(tokenizer) <= VOCAB_SIZE == config.text_config.vocab_size
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == config.text_config.pad_token_id


@pytest.mark.parametrize("medium", ["image", "video", "text"])
def test_forward_pass_gives_finite_loss(demo: DemoPaths, processor: Any, medium: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(demo.model)
    parts = [{"type": "text", "text": "How many shapes are red?"}]
    media: dict[str, Any] = {}
    if medium != "text":
        parts.insert(0, {"type": medium})
    if medium == "image":
        media["images"] = [Image.new("RGB", (100, 60), "red")]
    if medium == "video":
        media = {"videos": [torch.zeros(4, 3, 64, 64, dtype=torch.uint8)], "do_sample_frames": False}
        media["video_metadata"] = [{"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3], "duration": 2.0}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    batch = processor(text=[text], return_tensors="pt", **media)
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss
    # A fresh model is about as unsure as a uniform guess over the vocabulary: ln 1024 = 6.93.
    assert 6 < loss.item() < 8


def test_model_depends_on_the_seed_alone(demo: DemoPaths, tmp_path: Path) -> None:
    import torch

    from odb_factory.tools.demo.model import make_vl_model

    state = torch.random.get_rng_state()
    made = {seed: make_vl_model(tmp_path / str(seed), seed=seed) / "model.safetensors" for seed in (0, 1)}
    assert torch.equal(state, torch.random.get_rng_state())
    assert made[0].read_bytes() == (demo.model / "model.safetensors").read_bytes()
    assert made[0].read_bytes() != made[1].read_bytes()


def test_text_model_loads_and_shares_the_tokenizer(processor: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = make_text_model(tmp_path / "text")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    batch = tokenizer(["What is 3 + 4?", "ok"], return_tensors="pt", padding=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert torch.isfinite(model(**batch, labels=batch["input_ids"]).loss)


def test_tokenizer_is_the_same_every_time() -> None:
    assert make_tokenizer().backend_tokenizer.to_str() == make_tokenizer().backend_tokenizer.to_str()


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(processor: Any, text: str) -> None:
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def test_every_special_token_is_one_token(processor: Any) -> None:
    for token in (*CONTROL_TOKENS, *VISIBLE_TOKENS):
        assert len(processor.tokenizer(token)["input_ids"]) == 1, token
    ids = processor.tokenizer("<|im_start|>a<think>b<|im_end|>")["input_ids"]
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_chat_template_agrees_with_llamafactory(demo: DemoPaths, processor: Any) -> None:
    from llamafactory.data.template import TEMPLATES

    row = next(row for row in read(demo.data, "odb_demo_text") if len(row["conversations"]) >= 4)
    pairs = TEMPLATES["qwen3_vl_nothink"].encode_multiturn(processor.tokenizer, as_messages(row), None, None)
    assert processor.tokenizer.decode([i for pair in pairs for part in pair for i in part]) == (
        processor.apply_chat_template(as_messages(row))
    )


def test_image_tokens_follow_the_size(processor: Any) -> None:
    sizes = [(48, 48), (100, 100), (320, 320)]
    grids = [
        processor.image_processor([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"] for size in sizes
    ]
    assert [int(grid.prod()) // 4 for grid in grids] == [4, 9, 100]


def test_lengths_are_long_tailed(demo: DemoPaths, processor: Any) -> None:
    lengths = [observed_length(demo, processor, row) for row in read(demo.data, "odb_demo")]
    assert 15 <= min(lengths) <= 30
    assert 600 <= max(lengths) <= 1000  # under the recipes' cutoff_len, which would cut image tokens away
    assert 0.8 <= statistics.pstdev(lengths) / statistics.mean(lengths) <= 1.2


def test_marker_counts_what_was_written(demo: DemoPaths) -> None:
    facts = json.loads((demo.root / "odb_demo.json").read_text(encoding="utf-8"))
    pictures = [len(row["images"]) for row in read(demo.data, "odb_demo")]
    assert facts == {
        "samples": SAMPLES,
        "one_image": pictures.count(1),
        "several_images": sum(count > 1 for count in pictures),
        "text_only": pictures.count(0),
        "text_samples": len(read(demo.data, "odb_demo_text")),
        "eval_samples": len(read(demo.data, "odb_demo_eval")),
        "seed": 0,
        "complete": True,
    }
    assert (facts["one_image"], facts["several_images"], facts["text_only"]) == (66, 12, 42)


def test_every_row_is_sound(demo: DemoPaths) -> None:
    info = json.loads(demo.dataset_info.read_text(encoding="utf-8"))
    assert set(info) == set(SETS)
    named = set()
    for name in SETS:
        for row in read(demo.data, name):
            texts = [turn["value"] for turn in row["conversations"]]
            assert [turn["from"] for turn in row["conversations"]] == ["human", "gpt"] * (len(texts) // 2)
            assert all(texts)
            assert sum(text.count("<image>") for text in texts) == len(row["images"])
            assert not any("<video>" in text or "<|" in text for text in texts)
            named.update(row["images"])
    assert named == {f"images/{file.name}" for file in (demo.data / "images").iterdir()}
    for file in sorted(named)[::10]:
        with Image.open(demo.data / file) as image:
            assert image.mode == "RGB"
            assert all(48 <= side <= 320 for side in image.size)


@pytest.mark.parametrize("seed", [0, 5])
def test_eval_samples_are_held_out(seed: int) -> None:
    train = build_samples(400, seed)
    held_out = build_samples(100, seed, split="eval", unlike=train)
    assert not set(train) & set(held_out)
    assert len(held_out) == 100


def test_data_depends_on_the_seed_alone(demo: DemoPaths, tmp_path: Path) -> None:
    def content(directory: Path) -> dict[str, bytes]:
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        return {str(file.relative_to(directory)): file.read_bytes() for file in files}

    make_data(tmp_path / "same", SAMPLES, 0)
    make_data(tmp_path / "other", SAMPLES, 1)
    assert content(tmp_path / "same") == content(demo.data)
    assert read(tmp_path / "other", "odb_demo") != read(demo.data, "odb_demo")


@pytest.mark.parametrize("samples", [7, 0, -1])
def test_too_few_samples(tmp_path: Path, samples: int) -> None:
    for make in (make_demo, make_data):
        with pytest.raises(ValueError, match="pass samples=8 or more"):
            make(tmp_path / "demo", samples, 0)
    assert not (tmp_path / "demo").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose a new or empty directory"):
        make_demo(tmp_path, samples=8)
    with pytest.raises(FileExistsError, match="is a file"):
        make_demo(tmp_path / "model" / "precious.txt", samples=8)
    assert [file.name for file in tmp_path.rglob("*")] == ["model", "precious.txt"]


def test_a_demo_is_rewritten(tmp_path: Path) -> None:
    make_demo(tmp_path, samples=16)
    (tmp_path / "run").mkdir()
    paths = make_demo(tmp_path, samples=8, seed=3)
    assert len(read(paths.data, "odb_demo")) == 8
    assert len({file.name.split("-0")[0] for file in (paths.data / "images").iterdir()}) == 2
    assert not list((paths.data / "images").glob("odb_demo-00008*"))
    assert (tmp_path / "run").is_dir()
