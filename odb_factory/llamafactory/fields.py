"""The recipe fields `odb_*` that LLaMA-Factory's trainer and its v1 have in common."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from odb_factory.config import OdbConfig
from odb_factory.trainer.attention import attention_length
from odb_factory.trainer.options import AUTO, check_samples_per_update

DEFAULTS = OdbConfig(token_budget=1)


def option(default: Any, text: str) -> Any:
    """A field with a default and a text for `--help`."""
    return field(default=default, metadata={"help": text})


class TokensOrAuto:
    """What a command-line flag says of a number of tokens: the number, `auto` or `null`; int, str or None."""

    def __new__(cls, text: str) -> Any:
        try:
            return text if text == AUTO else None if text == "null" else int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a number of tokens, {AUTO} or null, got {text!r}") from None


def extend(stock: type, ours: type, name: str, module: str) -> type:
    """A class of LLaMA-Factory's arguments with our fields and checks; `module` has it under its name, for pickle."""
    return dataclass(type(name, (ours, stock), {"__module__": module, "__doc__": ours.__doc__}))


@dataclass
class OdbFields:
    """Put before LLaMA-Factory's own arguments in a dataclass's bases."""

    odb_token_budget: TokensOrAuto | None = field(
        default=None,
        metadata={
            "help": "Most padded tokens in a micro-batch, or auto: the most that fits into memory, found first. "
            "Default: per_device_train_batch_size x cutoff_len, the worst case that the fixed-batch recipe fits."
        },
    )
    odb_samples_per_update: int | None = option(
        None,
        "An optimizer update closes when so many samples were emitted since the last one, over all ranks, instead of "
        "after gradient_accumulation_steps micro-batches. Keeps a tuned batch size and learning rate at any budget. "
        "Default: those micro-batches.",
    )
    odb_depth: int = option(
        DEFAULTS.depth, "D: samples that a rank holds ready to choose from. More: less padding, more host memory."
    )
    odb_alignment: Literal["carry", "max"] = option(
        DEFAULTS.alignment,
        "How the ranks agree on the steps of a round: `carry` lets only full groups go before the end of the epoch, "
        "`max` is the paper's rule.",
    )
    odb_split: Literal["balanced", "singleton"] = option(
        DEFAULTS.split, "How a rank with too few groups makes more: halve the largest, or the paper's single samples."
    )
    odb_join: bool = option(
        DEFAULTS.join,
        "True: train on every sample once an epoch. False: the epoch ends when odb_quota of them are trained on.",
    )
    odb_quota: float = option(
        DEFAULTS.quota,
        "Without odb_join: share of the samples after which an epoch ends; the rest is left and counted.",
    )
    odb_overlong: Literal["keep", "drop", "error"] = option(
        DEFAULTS.overlong,
        "A sample longer than the budget: train on it alone, drop it (counted), or stop with an error.",
    )
    odb_on_bad_sample: Literal["raise", "skip"] = option(
        DEFAULTS.on_bad_sample,
        "A sample that cannot be read or used (corrupt media, wrong placeholders, no label left): stop with an error, "
        "or skip it (counted and named).",
    )
    odb_max_bad_samples: int | None = option(
        DEFAULTS.max_bad_samples,
        "With odb_on_bad_sample skip: more bad samples in an epoch end the run. null: no bound.",
    )
    odb_max_samples: int | None = option(None, "Most samples in a micro-batch. Default: no bound.")
    odb_max_patches: int | None = option(
        None, "Most visual patches in a micro-batch of several samples. Default: no bound."
    )
    odb_assignment: Literal["shared", "static"] = option(
        DEFAULTS.assignment,
        "Which rank reads which sample: the one whose window lacks some, or fixed shares of the epoch's order.",
    )
    odb_attention_length: TokensOrAuto | None = field(
        default=AUTO,  # type: ignore[assignment]
        metadata={
            "help": "Row length (tokens) at which attention takes as long as all else in the model. The ranks' work in "
            "a step is evened out by it. auto: by the model's configuration. null: attention counts nothing."
        },
    )
    odb_idle: Literal["filler", "skip"] = option(
        DEFAULTS.idle, "What a rank without a group runs: a filler of weight zero, or nothing (one rank only)."
    )
    odb_max_wait: int = option(DEFAULTS.max_wait, "Rounds for which a sample may be held back by `carry`.")
    odb_capacity: int | None = option(None, "Most groups that a rank emits in a round. Default: no bound.")
    odb_window_bytes: int | None = option(
        None, "Most bytes of samples that a rank holds ready. Default: a share of the host's available memory."
    )
    odb_queue_steps: int = option(DEFAULTS.queue_steps, "Finished micro-batches that wait for the trainer, at most.")
    odb_ramp: bool = option(DEFAULTS.ramp, "Begin an epoch with smaller windows, so that the first step comes quickly.")
    odb_audit: bool = option(
        False, "Write odb_audit.rank{r}.jsonl into output_dir: a line a step with the indices of its samples."
    )
    odb_timeout: float = option(
        DEFAULTS.timeout, "Seconds that a rank waits for another one, or for its own data, before it raises."
    )
    odb_port: int = option(
        DEFAULTS.port, "TCP port of rank 0's machine where the ranks' collate processes meet; 0: any free one."
    )

    def check_odb_fields(self) -> None:
        """Raise ValueError for a value that cannot be, in the name of its field.

        The budget may depend on other arguments; everything else is checked now, before anything is loaded.
        """
        # a quoted "false" would count as true
        if not isinstance(self.odb_audit, bool):
            raise ValueError(f"odb_audit must be true or false, got {self.odb_audit!r}.")
        given: Any = self.odb_token_budget
        if isinstance(given, str) and given != AUTO:
            raise ValueError(f"odb_token_budget must be a positive integer, or {AUTO}, got {given!r}.")
        length: Any = self.odb_attention_length
        if isinstance(length, str) and length != AUTO:
            raise ValueError(f"odb_attention_length must be a positive integer, {AUTO} or null, got {length!r}.")
        self.odb_config(
            budget=1 if given in (None, AUTO) else given,
            pad_to_multiple_of=1,
            attention_length=None if length == AUTO else length,
        )
        check_samples_per_update(self.odb_samples_per_update)

    def attention_length(self, load_config: Callable[[], Any], *, longest: int, trained: bool) -> int | None:
        """`OdbConfig.attention_length` as these fields say it.

        Args:
            load_config: gives the `PretrainedConfig` of the model that is trained; called where it is needed.
            longest, trained: see `odb_factory.trainer.attention`.
        """
        given: Any = self.odb_attention_length
        return attention_length(load_config(), longest=longest, trained=trained) if given == AUTO else given

    def odb_config(self, *, budget: int, **more: Any) -> OdbConfig:
        """The `OdbConfig` of these fields.

        Args:
            budget: the token budget (tokens).
            more: fields of `OdbConfig` that are no recipe fields.

        Raises:
            ValueError: a field has an impossible value; the text names the recipe field.
        """
        names = (
            "depth",
            "alignment",
            "split",
            "join",
            "quota",
            "overlong",
            "on_bad_sample",
            "max_bad_samples",
            "max_samples",
            "max_patches",
            "assignment",
            "idle",
            "max_wait",
            "capacity",
            "window_bytes",
            "queue_steps",
            "ramp",
            "timeout",
            "port",
        )
        values = {name: getattr(self, f"odb_{name}") for name in names}
        try:
            return OdbConfig(token_budget=budget, **values, **more)
        except ValueError as error:
            raise ValueError(f"odb_{error}") from None
