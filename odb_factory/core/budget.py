"""The token budget: what a group costs, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.core.sample import SampleMeta


def ceil_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_work(rows: int, width: int, attention_length: int | None) -> int:
    """What a micro-batch asks of the accelerator: `rows` x `width` x (1 + `width` / `attention_length`).

    In padded tokens: one that attends to nothing counts 1. The arithmetic of attention grows with the square of the
    row length, and all else with the row length, so micro-batches of like padded tokens differ where rows are long.

    Args:
        rows: samples, each a row of the padded micro-batch.
        width: row length (tokens).
        attention_length: see `OdbConfig`; None: attention counts nothing.
    """
    tokens = rows * width
    return tokens if attention_length is None else tokens + tokens * width // attention_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Upper bounds on one group. All counts are of the padded micro-batch, as the accelerator sees it."""

    tokens: int
    """`L_max`, padded tokens."""
    pad_to_multiple_of: int = 1
    dummy_tokens: int = 0
    """Tokens appended to the *shortest* sample of a group without media (see `padded_length`)."""
    max_samples: int | None = None
    max_patches: int | None = None
    attention_length: int | None = None
    """Bounds nothing; see `OdbConfig`."""

    def padded_length(self, samples: Sequence[SampleMeta]) -> int:
        """Row length (tokens) of the padded micro-batch of `samples`.

        Groups are collated shortest first, because LLaMA-Factory appends its dummy image to the first row of a batch
        that has no media: on the shortest row it rarely makes the batch wider.
        """
        longest = max(s.length for s in samples)
        if self.dummy_tokens and not any(s.has_media for s in samples):
            longest = max(longest, min(s.length for s in samples) + self.dummy_tokens)
        return ceil_multiple(longest, self.pad_to_multiple_of)

    def cost(self, samples: Sequence[SampleMeta]) -> int:
        """Padded tokens of the micro-batch of `samples` (at least one sample)."""
        return self.padded_length(samples) * len(samples)

    def fits(self, samples: Sequence[SampleMeta]) -> bool:
        """Whether `samples` are within every bound. A single sample may fail this; it is a group of one then."""
        if self.max_samples is not None and len(samples) > self.max_samples:
            return False
        if self.max_patches is not None and sum(s.patches for s in samples) > self.max_patches:
            return False
        return self.cost(samples) <= self.tokens

    def overlong(self, sample: SampleMeta) -> bool:
        """Whether a micro-batch of `sample` alone exceeds the token budget."""
        return self.cost((sample,)) > self.tokens
