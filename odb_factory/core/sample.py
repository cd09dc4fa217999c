"""A sample as the batching sees it: numbers only, never its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What was observed of one processed sample."""

    index: int
    """Index in the dataset."""
    length: int
    """Observed length: input tokens after processing, visual tokens included."""
    loss_tokens: int
    """Supervised targets: `(labels[1:] != -100).sum()`."""
    patches: int = 0
    """Visual patches, before merging (0: text only)."""
    has_media: bool = False
    """The sample holds an image or a video."""
    nbytes: int = 0
    """Bytes that the window holds of it."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise BadSample("empty", f"sample {self.index} has {self.length} tokens")
        if self.loss_tokens < 0 or self.patches < 0:
            raise ValueError(f"sample {self.index} has a negative count: {self}.")


class _WithReason(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class BadSample(_WithReason, ValueError):
    """A sample that cannot be used; `on_bad_sample` says whether that ends the run.

    Raised by a dataset's `__getitem__`, which may also raise anything else: any exception is a bad sample.

    Args:
        reason: a short constant text, the key under which bad samples are counted.
        detail: what is wrong with this very sample.
    """


class DropSample(_WithReason):
    """Raised by a dataset's `__getitem__` to drop a sample: it is counted and named, never silently lost.

    Args:
        reason: a short constant text, the key under which dropped samples are counted.
        detail: what is wrong with this very sample.
    """


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that a policy took out of the epoch."""

    index: int
    reason: str
    detail: str = ""
    bad: bool = False
    """It was skipped since it could not be used; otherwise a policy of the dataset or the budget dropped it."""
