"""All batching methods, predicted for the same samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.tools.plan.fixed import predict_fixed, predict_packing, random_order, sorted_order
from odb_factory.tools.plan.observed import EpochSamples, Observed, make_epoch
from odb_factory.tools.plan.online import MOST_SIMULATED, predict_online
from odb_factory.tools.plan.prediction import Prediction

BUDGETS = (0.5, 1.0, 2.0, 4.0)
"""Budgets that are compared, as multiples of the recipe's."""

DEPTHS = (64, 256, 1024)
"""Depths that are compared beside the recipe's own."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The recipe's fields for fixed batches."""

    batch_size: int
    """per_device_train_batch_size."""
    accumulation: int
    """gradient_accumulation_steps."""
    cutoff: int
    """cutoff_len (tokens)."""
    rows_at_once: int
    """preprocessing_batch_size: the number of rows that packing combines at a time."""


class Comparison:
    """Predictions of an epoch of `observed.size` rows on `world_size` ranks.

    Args:
        config: the configuration of the recipe's own run, including `window_bytes`.
        packable: whether the samples are text only.
        samples_per_update: `odb_samples_per_update`.
    """

    def __init__(
        self,
        observed: Observed,
        config: OdbConfig,
        fixed: Fixed,
        *,
        world_size: int,
        packable: bool,
        samples_per_update: int | None = None,
    ) -> None:
        self._observed = observed
        self._config = config
        self._fixed = fixed
        self._world_size = world_size
        self._packable = packable
        self._samples_per_update = samples_per_update
        self._epochs: dict[int, EpochSamples] = {}
        self._online: dict[tuple[int, int, bool], Prediction] = {}
        self.multiple = config.pad_to_multiple_of
        """Lengths are padded to a multiple of this (tokens)."""
        self.longest = max(make_budget(config).cost((meta,)) for meta in observed.metas)
        """Padded tokens of the longest sample."""
        self.depth_values = sorted({*DEPTHS, config.depth})
        """Depths to compare."""

    def _epoch(self, size: int) -> EpochSamples:
        if size not in self._epochs:
            self._epochs[size] = make_epoch(self._observed, size, self._config.seed)
        return self._epochs[size]

    def online(self, budget: int, depth: int, *, bounded: bool = True) -> Prediction:
        """ODB; `bounded=False` ignores the windows' byte limit."""
        key = budget, depth, bounded
        if key not in self._online:
            config = self._config if bounded else dataclasses.replace(self._config, window_bytes=None)
            # `error` would stop the simulation at a smaller budget; the comparison should show that budget all the same
            overlong = "keep" if config.overlong == "error" else config.overlong
            variant = dataclasses.replace(config, token_budget=budget, depth=depth, overlong=overlong)
            size = self._observed.size
            made = predict_online(self._epoch, size, variant, self._world_size, self._samples_per_update)
            self._online[key] = dataclasses.replace(made, exact=made.exact and not self._would_stop)
        return self._online[key]

    @property
    def _would_stop(self) -> bool:
        """Whether a run would stop at a bad sample."""
        bad, most = len(self._observed.bad), self._config.max_bad_samples
        return bad > 0 and (self._config.on_bad_sample == "raise" or (most is not None and bad > most))

    def budgets(self) -> tuple[Prediction, ...]:
        """ODB at the recipe's depth and several budgets, smallest first."""
        own, multiple = self._config.token_budget, self._config.pad_to_multiple_of
        budgets = {max(multiple, round(own * factor)) for factor in BUDGETS}
        return tuple(self.online(budget, self._config.depth) for budget in sorted(budgets))

    def depths(self, budget: int | None = None) -> tuple[Prediction, ...]:
        """ODB at a budget (None: the recipe's) and several depths, smallest first."""
        return tuple(self.online(budget or self._config.token_budget, depth) for depth in self.depth_values)

    def standard(self) -> Prediction:
        """Stock LLaMA-Factory with the recipe's batch size."""
        size = len(self._stock_epoch.usable)
        order = random_order(size, self._config.seed) if self._config.shuffle else list(range(size))
        exact = self._stock_epoch.exact and not self._observed.bad  # stock LLaMA-Factory stops at a bad sample
        return self._fixed_batches("standard", order, exact=exact)

    def sorted(self) -> Prediction:
        """Stock LLaMA-Factory with `group_by_length`."""
        lengths = [sample.length for sample in self._stock_epoch.usable]
        group = self._fixed.batch_size * self._fixed.accumulation
        return self._fixed_batches("sorted", sorted_order(lengths, group, self._config.seed), exact=False)

    def packing(self) -> Prediction | None:
        """Stock LLaMA-Factory with `packing`; None: not for samples with media."""
        if not self._packable:
            return None
        prediction = predict_packing(
            self._stock_epoch.usable,
            cutoff=self._fixed.cutoff,
            rows_at_once=self._fixed.rows_at_once,
            batch_size=self._fixed.batch_size,
            world_size=self._world_size,
            accumulation=self._fixed.accumulation,
            multiple=self._config.pad_to_multiple_of,
            attention_length=self._config.attention_length,
        )
        return self._whole(prediction)

    @property
    def _stock_epoch(self) -> EpochSamples:
        return self._epoch(min(self._observed.size, MOST_SIMULATED))

    def _fixed_batches(self, method: str, order: Sequence[int], *, exact: bool) -> Prediction:
        prediction = predict_fixed(
            method,
            self._stock_epoch.usable,
            order,
            batch_size=self._fixed.batch_size,
            world_size=self._world_size,
            accumulation=self._fixed.accumulation,
            multiple=self._config.pad_to_multiple_of,
            dummy_tokens=self._config.dummy_tokens,
            attention_length=self._config.attention_length,
            exact=exact,
        )
        return self._whole(prediction)

    def _whole(self, prediction: Prediction) -> Prediction:
        """Extrapolate to the whole epoch if only a part was predicted: all steps of fixed batches are alike."""
        share = self._observed.size / len(self._stock_epoch.samples)
        if share == 1:
            return prediction
        names = ("samples", "useful_work", "tokens", "padded_tokens", "slowest_work", "steps", "updates")
        values = {name: round(getattr(prediction, name) * share) for name in names}
        return dataclasses.replace(prediction, **values, exact=False)
