"""The public data sets that we know how to prepare: where they are published, and how they become ours."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.tools.data import convert


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A data set as it is published."""

    title: str
    name: str
    """Its name in `dataset_info.json`, which the recipes use."""
    repository: str
    """On the Hugging Face Hub."""
    revision: str | None
    """None: the newest. A list of files with hashes in their names is good for one revision only."""
    files: tuple[str, ...]
    columns: tuple[str, ...]
    """What Parquet files must have; `id_column` is read, too, where they have it."""
    converter: convert.Converter
    rows: int
    """Rows of the published data set, about; for the progress bar of a download only."""
    local: str
    """What a local copy looks like; ends a sentence."""
    local_files: str
    """Pattern of its files' names."""
    id_column: str = "id"
    """What names a row, beside its number."""
    archive: str | None = None
    """A zip file with the images, in the same repository."""
    images_url: str | None = None
    """Where single images are."""
    image_folders: tuple[str, ...] = ()
    """Where images lie in a local copy, beside the folder itself."""
    image_archives: tuple[str, ...] = ()
    """Zip files that a local copy may hold instead."""
    recipes: str = ""

    @property
    def has_images(self) -> bool:
        """Whether its rows have an image each."""
        return bool(self.archive or self.images_url)


SETS = {
    "ultrachat": PublicSet(
        title="UltraChat 200K",
        name="ultrachat_200k",
        repository="HuggingFaceH4/ultrachat_200k",
        revision="8049631c405ae6576f93f445c6b8166f76f5505a",
        files=(
            "data/train_sft-00000-of-00003-a3ecf92756993583.parquet",
            "data/train_sft-00001-of-00003-0a1804bcb6ae68c6.parquet",
            "data/train_sft-00002-of-00003-ee46ed25cfae92c6.parquet",
        ),
        columns=("messages",),
        converter=convert.ultrachat,
        rows=207_865,
        id_column="prompt_id",
        local="a folder with its train_sft-*.parquet, or a .parquet or .jsonl file with a column messages",
        local_files="train_sft-*.parquet",
        recipes="ultrachat",
    ),
    "llava": PublicSet(
        title="LLaVA-Instruct 150K",
        name="llava_150k",
        repository="liuhaotian/LLaVA-Instruct-150K",
        revision=None,
        files=("llava_instruct_150k.json",),
        columns=("image", "conversations"),
        converter=convert.llava,
        rows=157_712,
        local="a folder with llava_instruct_150k.json and COCO's images, as train2017/ or train2017.zip",
        local_files="llava_instruct_150k.json",
        images_url="http://images.cocodataset.org/train2017/",
        image_folders=("train2017", "coco/train2017", "images", "images/train2017"),
        image_archives=("train2017.zip", "images.zip"),
        recipes="llava",
    ),
    "sharegpt4o": PublicSet(
        title="ShareGPT-4o image captions",
        name="sharegpt4o_57k",
        repository="OpenGVLab/ShareGPT-4o",
        revision=None,
        files=("image_conversations/gpt-4o.jsonl",),
        columns=("image", "conversations"),
        converter=convert.sharegpt4o,
        rows=57_289,
        id_column="image",
        local="a folder with image_conversations/gpt-4o.jsonl and the images, as images/ or images.zip",
        local_files="gpt-4o.jsonl",
        archive="images.zip",
        image_folders=("images", "image", "mnt/petrelfs/wangwenhai/workspace_cef/4o/image"),
        image_archives=("images.zip",),
        recipes="sharegpt4o",
    ),
}
"""By the word that the command takes."""
