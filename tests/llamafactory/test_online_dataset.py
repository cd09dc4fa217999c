"""The online data set: stock LLaMA-Factory's samples, row by row, and a clear word where a row cannot be used."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from odb_factory.core.sample import BadSample, DropSample
from odb_factory.llamafactory.online_dataset import INVALID, observe_online
from odb_factory.runtime.errors import SampleError, is_of_the_machine
from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.helpers import RECIPE, Parts, row, train_args

BAD = {
    "even": [("human", "Hello"), ("gpt", "hi"), ("human", "And now?")],
    "roles": [("human", "Hello"), ("human", "Hello?"), ("gpt", "hi"), ("gpt", "hello")],
    "first": [("gpt", "I begin."), ("human", "No.")],
}
"""Conversations that stock LLaMA-Factory drops."""


@pytest.fixture(scope="module")
def folder(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's conversations with `BAD` ones between them, as files."""
    folder = tmp_path_factory.mktemp("rows")
    rows = json.loads((demo.data / "odb_demo.json").read_text(encoding="utf-8"))[:24]
    for place, turns in zip((3, 11, 20), BAD.values(), strict=True):
        conversation = [{"from": who, "value": text} for who, text in turns]
        rows.insert(place, {"conversations": conversation, "images": []})
    (folder / "mixed.json").write_text(json.dumps(rows), encoding="utf-8")
    columns = {"messages": "conversations", "images": "images"}
    info = {"mixed": {"file_name": "mixed.json", "formatting": "sharegpt", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "images").symlink_to(demo.data / "images")
    return folder


@pytest.fixture(scope="module")
def arguments(demo: DemoPaths, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """LLaMA-Factory's arguments of a recipe with that data set."""
    return train_args(
        {
            **RECIPE,
            "model_name_or_path": str(demo.model),
            "dataset": "mixed",
            "dataset_dir": str(folder),
            "output_dir": str(tmp_path_factory.mktemp("out")),
        }
    )


@pytest.fixture(scope="module")
def rows(arguments: tuple[Any, ...]) -> Any:
    """The aligned rows, loaded by LLaMA-Factory."""
    from llamafactory.data.loader import _get_merged_dataset

    model_args, data_args, training_args, *_ = arguments
    return _get_merged_dataset(data_args.dataset, model_args, data_args, training_args, "sft")


@pytest.mark.parametrize("options", [{}, {"train_on_prompt": True}, {"mask_history": True}], ids=str)
def test_samples_equal_stock_preprocessing(
    vl: Parts, arguments: tuple[Any, ...], rows: Any, options: dict[str, Any]
) -> None:
    from llamafactory.data.loader import _get_preprocessed_dataset

    parts = vl.with_data_args(**options)
    stock = _get_preprocessed_dataset(
        rows, parts.data_args, arguments[2], "sft", parts.template, parts.tokenizer, parts.processor
    )
    dataset = parts.online(rows)
    assert len(dataset) == len(rows) == len(stock) + len(BAD)
    samples, dropped = [], {}
    for index in range(len(dataset)):
        try:
            samples.append(dataset[index])
        except DropSample as drop:
            dropped[index] = drop
    assert list(dropped) == [3, 11, 20]
    for index, drop in dropped.items():
        assert drop.reason == INVALID
        assert f"row {index} of the training split" in drop.detail
    for sample, expected in zip(samples, stock, strict=True):
        for key in ("input_ids", "attention_mask", "labels"):
            assert sample[key] == expected[key]
        assert sample["n_images"] == len(expected["images"] or [])
    assert sum(sample["n_images"] > 0 for sample in samples) > 5


@pytest.mark.parametrize(
    ("turns", "detail"),
    [
        (("Hello",), "0 prompt and 1 response"),
        (("Hello", "hi", "Again"), "2 prompt and 1 response"),
        (("a", "b", "c", "d", "e"), "4 prompt and 1 response"),
    ],
)
def test_invalid_conversation_is_dropped_as_in_stock(vl: Parts, turns: tuple[str, ...], detail: str) -> None:
    bad, good = row(*turns), row("Hello", "hi")
    with pytest.raises(DropSample, match=detail):
        vl.online([good, bad])[1]
    assert len(vl.stock_features([good, bad])) == 1


def test_two_answers_are_dropped_as_in_stock(vl: Parts) -> None:
    bad, good = row("Hello", "hi"), row("Hello", "hi")
    bad["_response"] = bad["_response"] * 2
    with pytest.raises(DropSample, match="1 prompt and 2 response"):
        vl.online([bad])[0]
    assert len(vl.stock_features([good, bad])) == 1


def test_audio_is_refused(vl: Parts) -> None:
    with pytest.raises(BadSample, match="audio: it has audio, which odb does not support; remove it from the data"):
        vl.online([row("a", "b"), row("<audio>What?", "music", audios=["tone.wav"])])[1]


@pytest.mark.parametrize("template", ["qwen2_omni", "llava", "glm4v"])
def test_unsupported_plugin_is_refused(vl: Parts, template: str) -> None:
    from llamafactory.data.template import TEMPLATES

    plugin = type(TEMPLATES[template].mm_plugin).__name__
    parts = Parts(TEMPLATES[template], vl.tokenizer, vl.processor, None, vl.data_args)
    with pytest.raises(ValueError, match=f"plugin {plugin} is not supported; use a text-only template or one of Qwen"):
        parts.online([row("a", "b")])


# -- truncation and placeholders


def test_cut_through_an_image_is_an_error(vl: Parts, media: dict[str, Any]) -> None:
    bad = row("<image>What is this?", "something wide", images=[media["wide"]])
    pad = vl.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    whole = vl.online([bad])[0]["input_ids"].count(pad)
    parts = vl.with_data_args(cutoff_len=10)
    left = parts.stock_features([bad])[0]["input_ids"].count(pad)  # stock hands it to the model, which then fails
    assert 0 < left < whole
    text = f"truncated media: {left} image tokens where its media need {whole}: it was cut at cutoff_len 10; "
    with pytest.raises(BadSample, match=text + "raise cutoff_len, or lower image_max_pixels"):
        parts.online([row("a", "b"), bad])[1]


def test_cut_through_a_video_is_an_error(vl: Parts, media: dict[str, Any]) -> None:
    bad = row("<video>What is this?", "noise", videos=[media["mp4"]])
    length = len(vl.online([bad])[0]["input_ids"])
    text = r"truncated media: \d+ video tokens where its media need .*lower video_max_pixels"
    with pytest.raises(BadSample, match=text):
        vl.with_data_args(cutoff_len=length // 2).online([bad])[0]


def test_cut_after_the_image_is_fine(vl: Parts, media: dict[str, Any]) -> None:
    long = row("<image>What is this?", "words " * 60, images=[media["wide"]])
    length = len(vl.online([long])[0]["input_ids"])
    parts = vl.with_data_args(cutoff_len=length - 20)
    sample = parts.online([long])[0]
    assert len(sample["input_ids"]) == length - 20
    assert sample["input_ids"] == parts.stock_features([long])[0]["input_ids"]


def test_history_cut_away_with_its_image_is_an_error(vl: Parts, media: dict[str, Any]) -> None:
    """`mask_history` keeps the last turns; the image of a turn that falls away would have no tokens."""
    bad = row("<image>What is this?", "a picture", "Now count.", "words " * 60, images=[media["small"]])
    parts = vl.with_data_args(cutoff_len=50, mask_history=True)
    with pytest.raises(BadSample, match="truncated media: 0 image tokens"):
        parts.online([bad])[0]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_literal_placeholder_is_an_error(vl: Parts, token: str) -> None:
    kind = "image" if "image" in token else "video"
    text = rf"placeholder mismatch: 1 {kind} tokens where its media need 0: its text holds a literal <\|{kind}_pad"
    with pytest.raises(BadSample, match=text):
        vl.online([row(f"What does {token} mean?", "a picture")])[0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_images_must_fit_the_text(vl: Parts, media: dict[str, Any], count: int) -> None:
    bad = row("<image><image>Compare.", "they differ", images=[media["small"]] * count)
    text = f"placeholder mismatch: images: {count}, <image> in its text: 2; the numbers must agree"
    with pytest.raises(BadSample, match=text):
        vl.online([bad])[0]


def test_missing_file_names_it(vl: Parts) -> None:
    with pytest.raises(BadSample, match=r"missing image: there is no file nowhere\.png"):
        vl.online([row("<image>?", "?", images=["nowhere.png"])])[0]


def test_media_with_a_text_template_is_an_error(text: Parts, media: dict[str, Any]) -> None:
    with pytest.raises(BadSample, match="the template does not support image input; choose another template"):
        text.online([row("<image>?", "?", images=[media["small"]])])[0]


# -- observation


def test_observed_numbers(vl: Parts, media: dict[str, Any]) -> None:
    rows = [
        row("What is 3 + 4?", "7"),
        row("<image>What?", "small", "And <image>?", "wide", images=[media["small"], media["wide"]]),
        row("<video>What?", "noise", videos=[media["avi"]]),
        row("<video><image>What?", "both", images=[media["small"]], videos=[media["avi"]]),
    ]
    dataset = vl.online(rows)
    for index, patches in enumerate((0, 16 + 10 * 4, 2 * 4 * 4, 2 * 4 * 4 + 16)):  # of 16 x 16 pixels
        sample = dataset[index]
        meta = observe_online(index, sample)
        assert meta.index == index
        assert meta.length == len(vl.stock_features(rows[index : index + 1])[0]["input_ids"])
        assert meta.loss_tokens == sum(label != -100 for label in sample["labels"][1:])
        assert meta.loss_tokens > 0
        assert meta.patches == patches
        assert meta.has_media == (index > 0)
        rowcount = [sample["mm_inputs"][key].shape[0] for key in sample["mm_inputs"] if key.startswith("pixel_values")]
        assert sum(rowcount) == patches


def test_loss_tokens_count_what_is_left_after_truncation(vl: Parts) -> None:
    long = row("words " * 40, "answer " * 40)
    meta = observe_online(0, vl.with_data_args(cutoff_len=30).online([long])[0])
    assert meta.length == 30
    assert 0 < meta.loss_tokens < 30


def test_example_is_the_first_valid_row(vl: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    vl.online([row("Hello"), row("Which colour?", "purple")]).show_example()
    shown = capsys.readouterr().out
    assert shown.startswith("training example:\ninput_ids:\n")
    assert "labels:\npurple<|im_end|>" in shown
    with pytest.raises(RuntimeError, match=r"Cannot find valid samples, .* for the data format\.$"):
        vl.online([row("Hello")]).show_example()


BROKEN = row("<image>Broken?", "yes", images=["nowhere.png"])


def test_example_passes_over_bad_rows_where_they_are_skipped(vl: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = vl.online([row("Hello"), BROKEN, row("<audio>?", "?", audios=["a.wav"]), row("Which colour?", "purple")])
    dataset.show_example(skip_bad=True, max_bad=2)
    assert "labels:\npurple<|im_end|>" in capsys.readouterr().out
    with pytest.raises(SampleError, match=r"^2 samples at the start .* \(odb_max_bad_samples\) 1 .*row 2 of .* audio"):
        dataset.show_example(skip_bad=True, max_bad=1)
    with pytest.raises(RuntimeError, match=r"Cannot find valid samples.* All 1 rows .*missing image: .*nowhere\.png"):
        vl.online([row("Hello"), BROKEN]).show_example(skip_bad=True)


def test_example_stops_at_a_bad_row_where_they_are_errors(vl: Parts) -> None:
    text = r'sample 1 could not be read: row 1 of .*, "<image>Broken\?", nowhere\.png: missing image: there is no file'
    with pytest.raises(SampleError, match=text):
        vl.online([row("Hello"), BROKEN, row("Which colour?", "purple")]).show_example()


@pytest.mark.parametrize("skip", [True, False])
def test_example_never_passes_over_an_error_of_the_machine(
    vl: Parts, media: dict[str, Any], monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    def full(path: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr("llamafactory.data.mm_plugin.Image.open", full)
    dataset = vl.online([row("<image>?", "?", images=[media["small"]]), row("Which colour?", "purple")])
    with pytest.raises((OSError, SampleError), match="Too many open files"):
        dataset.show_example(skip_bad=skip)


# -- what a bad sample is blamed on


def test_the_broken_one_of_several_media_is_named(vl: Parts, media: dict[str, Any], tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(Path(media["wide"]).read_bytes()[:2000])
    frames = [*media["frames"][:2], str(cut)]
    gone = [*media["frames"][:2], str(tmp_path / "gone.jpg")]
    expected = {
        r"corrupt image: .*cut\.png: OSError: image file is truncated": {"images": [media["small"], str(cut)]},
        r"undecodable video: \S+cut\.png: OSError": {"videos": [media["mp4"], frames]},
        r"missing video: there is no file .*gone\.jpg$": {"videos": [media["frames"], gone]},
    }
    for text, parts in expected.items():
        places = {"images": "<image>", "videos": "<video>"}
        start = "".join(places[kind] * len(items) for kind, items in parts.items())
        with pytest.raises(BadSample, match=text):
            vl.online([row(start + "?", "?", **parts)])[0]


def test_an_image_that_the_processor_refuses_is_named(
    vl: Parts, media: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("absolute aspect ratio must be smaller than 200")

    dataset = vl.online([row("<image>?", "?", images=[media["wide"]])])
    monkeypatch.setattr(type(vl.processor.image_processor), "__call__", refuse)
    with pytest.raises(BadSample, match=r"image refused by the processor: \S+\.png: ValueError: absolute aspect ratio"):
        dataset[0]


def test_a_video_shorter_than_it_announces_is_bad(
    vl: Parts, media: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock LLaMA-Factory counts tokens by the file's header, and decodes later."""
    from llamafactory.data.mm_plugin import BasePlugin

    whole = row("<video>What?", "noise", videos=[media["mp4"]])
    assert vl.online([whole])[0]["n_videos"] == 1
    stock = type(vl.template.mm_plugin)._regularize_videos

    def half(plugin: BasePlugin, videos: Any, **options: Any) -> Any:
        found = stock(plugin, videos, **options)
        return {**found, "videos": [frames[:2] for frames in found["videos"]]}

    monkeypatch.setattr(type(vl.template.mm_plugin), "_regularize_videos", half)
    with pytest.raises(BadSample, match=r"undecodable video: .* decoded differs from what the file announces"):
        vl.online([whole])[0]


def test_a_tokenizer_that_fails_is_a_template_error(vl: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = vl.online([row("Hello", "hi")])
    monkeypatch.setattr(type(vl.tokenizer), "encode", lambda *args, **options: 1 // 0)
    with pytest.raises(BadSample, match="template error: ZeroDivisionError"):
        dataset[0]


@pytest.mark.parametrize("error", [MemoryError("no more"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("where", ["processor", "tokenizer"])
def test_lack_of_memory_is_no_bad_sample(
    vl: Parts, media: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    dataset = vl.online([row("<image>?", "?", images=[media["wide"]])])
    at = (vl.processor.image_processor, "__call__") if where == "processor" else (vl.tokenizer, "encode")
    monkeypatch.setattr(type(at[0]), at[1], fail)
    with pytest.raises(type(error)) as caught:  # as it came: the reader knows it for what it is
        dataset[0]
    assert is_of_the_machine(caught.value)


def test_a_missing_processor_is_an_error_at_once(vl: Parts) -> None:
    parts = Parts(vl.template, vl.tokenizer, None, None, vl.data_args)
    with pytest.raises(ValueError, match="Processor was not found"):
        parts.online([row("a", "b")])


def test_reading_does_not_change_the_rows(vl: Parts, media: dict[str, Any]) -> None:
    frames = list(media["odd_frames"])
    rows = [row("<video>What?", "noise", videos=[frames])]
    dataset = vl.online(rows)
    before = dataset.fingerprint()
    first, second = dataset[0], dataset[0]
    assert first["input_ids"] == second["input_ids"]
    assert frames == media["odd_frames"]
    assert dataset.fingerprint() == before
