"""Tiny models, data and media for the tests of the glue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo import DemoPaths, make_demo, make_text_model
from tests.llamafactory.helpers import Parts, make_parts, make_qwen2_5_vl

SAMPLES = 40


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """On few busy cores more threads only wait for each other. Also for what is started from here."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_TORCHRUN", "USE_V1", "USE_MCA", "ODB_FACTORY_DISABLE"):
            patch.delenv(name, raising=False)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """A Qwen3-VL and `odb_demo`, `odb_demo_text`, `odb_demo_eval`."""
    return make_demo(tmp_path_factory.mktemp("demo") / "made", samples=SAMPLES)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only Qwen3."""
    return make_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="session")
def vl(demo: DemoPaths) -> Parts:
    """The parts of a run with the Qwen3-VL."""
    return make_parts(demo.model, "qwen3_vl_nothink", "Qwen3VLForConditionalGeneration")


@pytest.fixture(scope="session")
def text(text_model: Path) -> Parts:
    """The parts of a run with the text-only model."""
    return make_parts(text_model, "qwen3_nothink", "Qwen3ForCausalLM")


@pytest.fixture(scope="session")
def vl2(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """The parts of a run with a Qwen2.5-VL: another plugin, with the seconds between a video's frames in the batch."""
    path = make_qwen2_5_vl(tmp_path_factory.mktemp("vl2") / "model")
    return make_parts(path, "qwen2_vl", "Qwen2_5_VLForConditionalGeneration")


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Paths by name: images `small`, `wide`, `grey` (with transparency), videos `mp4` (even), `avi` (odd), `frames`."""
    folder = tmp_path_factory.mktemp("media")
    found: dict[str, Any] = {}
    for name, size, mode in (("small", (64, 64), "RGB"), ("wide", (150, 70), "RGB"), ("grey", (90, 120), "LA")):
        found[name] = str(folder / f"{name}.png")
        picture(size, seed=size[0]).convert(mode).save(found[name])
    found["mp4"] = video(folder / "even.mp4", frames=20, size=(96, 64))
    found["avi"] = video(folder / "odd.avi", frames=15, size=(64, 80))
    for i in range(5):
        picture((80, 64), seed=i).save(folder / f"frame{i}.jpg")
    found["frames"] = [str(folder / f"frame{i}.jpg") for i in range(4)]
    found["odd_frames"] = [str(folder / f"frame{i}.jpg") for i in range(5)]
    return found


def picture(size: tuple[int, int], seed: int) -> Any:
    """A picture without structure, so that any pixel out of place shows."""
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values, "RGB")


def video(path: Path, frames: int, size: tuple[int, int]) -> str:
    """A video of 10 frames a second."""
    import av

    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(size, seed=i))))
        container.mux(stream.encode())
    return os.fspath(path)
