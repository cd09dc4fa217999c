"""What several tests of the glue share: a run's parts as stock LLaMA-Factory makes them, rows, and a comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odb_factory.llamafactory.collator import OdbCollator
from odb_factory.llamafactory.online_dataset import OnlineDataset

PAD_MULTIPLE = 8
"""As in LLaMA-Factory's train/sft/workflow.py."""

RECIPE: dict[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "template": "qwen3_vl_nothink",
    "dataset": "odb_demo",
    "use_cpu": True,
    "overwrite_output_dir": True,
    "report_to": "none",
}
"""Fields of every recipe; model_name_or_path, dataset_dir and output_dir are to be added."""


@dataclass
class Parts:
    """What LLaMA-Factory has at hand in an SFT run when the data are made."""

    template: Any
    tokenizer: Any
    processor: Any
    model: Any
    data_args: Any

    def with_data_args(self, **changes: Any) -> Parts:
        """The same with other data arguments."""
        data_args = copy.copy(self.data_args)
        for name, value in changes.items():
            assert hasattr(data_args, name), name
            setattr(data_args, name, value)
        return Parts(self.template, self.tokenizer, self.processor, self.model, data_args)

    def stock_encoder(self) -> Any:
        """The stock preprocessing of rows."""
        from llamafactory.data.processor import SupervisedDatasetProcessor

        return SupervisedDatasetProcessor(
            template=self.template, tokenizer=self.tokenizer, processor=self.processor, data_args=self.data_args
        )

    def stock_features(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The stock preprocessing's output, one feature dict a row that it keeps."""
        rows = copy.deepcopy(list(rows))  # the plugins append to lists of frames
        columns = self.stock_encoder().preprocess_dataset({key: [row[key] for row in rows] for key in rows[0]})
        count = len(columns["input_ids"])
        return [{key: values[i] for key, values in columns.items()} for i in range(count)]

    def stock_collator(self, dtype: torch.dtype = torch.float32) -> Any:
        """The collator, made as in LLaMA-Factory's train/sft/workflow.py."""
        from llamafactory.data import SFTDataCollatorWith4DAttentionMask

        return SFTDataCollatorWith4DAttentionMask(
            template=self.template,
            model=self.model,
            pad_to_multiple_of=PAD_MULTIPLE,
            label_pad_token_id=-100,
            block_diag_attn=False,
            neat_packing=False,
            attn_implementation="sdpa",
            compute_dtype=dtype,
            tokenizer=self.tokenizer,
            processor=self.processor,
        )

    def online(self, rows: Any, dtype: torch.dtype | None = None) -> OnlineDataset:
        """Our data set over `rows`."""
        return OnlineDataset(
            rows,
            template=self.template,
            tokenizer=self.tokenizer,
            processor=self.processor,
            data_args=self.data_args,
            dtype=dtype,
        )

    def stock_batch(self, rows: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """What stock LLaMA-Factory feeds to the model for `rows`."""
        return dict(self.stock_collator(dtype)(self.stock_features(rows)))

    def odb_batch(
        self,
        rows: Sequence[dict[str, Any]],
        dtype: torch.dtype = torch.float32,
        pixel_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """What we feed to the model for `rows`."""
        dataset = self.online(copy.deepcopy(rows), pixel_dtype)
        collator = OdbCollator(self.stock_collator(dtype), pixel_dtype)
        return collator([dataset[i] for i in range(len(rows))])


def train_args(recipe: dict[str, Any] | list[str]) -> tuple[Any, ...]:
    """LLaMA-Factory's own reading of a recipe: model, data, training, fine-tuning and generating arguments."""
    from llamafactory.hparams import get_train_args

    return get_train_args(recipe)  # type: ignore[return-value]


def make_parts(model_path: Path, template: str, model_class: str | None, **data: Any) -> Parts:
    """The parts of a run with the model at `model_path`; `model_class` is one of transformers, None loads no model."""
    import transformers
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from llamafactory.model import load_tokenizer

    data_args = DataArguments(template=template, **{"cutoff_len": 2048, **data})
    modules = load_tokenizer(ModelArguments(model_name_or_path=str(model_path)))
    model = getattr(transformers, model_class).from_pretrained(model_path) if model_class else None
    return Parts(
        get_template_and_fix_tokenizer(modules["tokenizer"], data_args),
        modules["tokenizer"],
        modules["processor"],
        model,
        data_args,
    )


def make_qwen2_5_vl(path: Path) -> Path:
    """Write a tiny random Qwen2.5-VL and its processor to `path`, and return `path`."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    from odb_factory.tools.demo import make_tokenizer

    tokenizer = make_tokenizer()
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 1024,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
            "tokens_per_second": 2,
        },
        **ids,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    size = {"shortest_edge": 28 * 28, "longest_edge": 512 * 512}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
    )
    processor.save_pretrained(path)
    return path


def row(*turns: str, images: Any = None, videos: Any = None, audios: Any = None, system: str = "") -> dict[str, Any]:
    """A row in LLaMA-Factory's aligned format: user and assistant turns by turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {
        "_prompt": messages[:-1],
        "_response": messages[-1:],
        "_system": system,
        "_tools": "",
        "_images": images,
        "_videos": videos,
        "_audios": audios,
    }


def assert_same(ours: Any, stock: Any, where: str = "batch") -> None:
    """Both are equal to the last bit: keys, types, dtypes, shapes and values."""
    if isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert ours.dtype == stock.dtype, where
        assert ours.shape == stock.shape, where
        assert torch.equal(ours, stock), where
    elif isinstance(stock, dict):
        assert isinstance(ours, dict), where
        assert set(ours) == set(stock), where
        for key in stock:
            assert_same(ours[key], stock[key], f"{where}.{key}")
    elif isinstance(stock, list | tuple):
        assert type(ours) is type(stock), where
        assert len(ours) == len(stock), where
        for i, (one, other) in enumerate(zip(ours, stock, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif hasattr(stock, "__dict__"):  # a video's metadata
        assert type(ours) is type(stock), where
        assert_same(vars(ours), vars(stock), where)
    else:
        assert type(ours) is type(stock), where
        assert ours == stock, where
