"""Random worlds for hypothesis: small ones drawn value by value (they shrink well), large ones from a seed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from odb_factory.config import OdbConfig
from odb_factory.core.sample import SampleMeta
from tests.core.invariants import World


def meta(
    index: int, length: int, patches: int = 0, *, media: bool | None = None, loss: int | None = None
) -> SampleMeta:
    """A sample with defaults: media where there are patches, half of its tokens supervised."""
    return SampleMeta(
        index=index,
        length=length,
        loss_tokens=length // 2 if loss is None else loss,
        patches=patches,
        has_media=patches > 0 if media is None else media,
    )


def metas(*lengths: int) -> list[SampleMeta]:
    """Text samples 0, 1, ... of these lengths."""
    return [meta(i, length) for i, length in enumerate(lengths)]


@st.composite
def samples(draw: st.DrawFn, size: int, max_length: int, at_least: int = 0) -> list[SampleMeta]:
    """Up to `size` samples, text or with media and patches, some without loss tokens.

    Windows of text only, and of short samples only, come often enough for groups of several samples under every bound.
    """
    longest = draw(st.sampled_from([max_length, max_length // 3, max_length // 8])) + 1
    patches = draw(st.sampled_from([st.just(0), st.sampled_from([0, 0, 0, 5]), st.integers(0, 12)]))
    rows = draw(st.lists(st.tuples(st.integers(1, longest), patches, st.booleans()), min_size=at_least, max_size=size))
    return [meta(i, length, p, loss=length // 2 * keep) for i, (length, p, keep) in enumerate(rows)]


def budgets() -> st.SearchStrategy[dict[str, Any]]:
    """The fields of a config that bound a group."""
    return st.fixed_dictionaries(
        {
            "token_budget": st.integers(8, 64),
            "pad_to_multiple_of": st.sampled_from([1, 1, 2, 8]),
            "dummy_tokens": st.sampled_from([0, 0, 3, 16]),
            "max_samples": st.one_of(st.none(), st.integers(1, 6)),
            "max_patches": st.one_of(st.none(), st.integers(1, 24)),
        }
    )


@st.composite
def configs(draw: st.DrawFn, *, join: bool, max_depth: int) -> OdbConfig:
    """Every option that the core knows, within small numbers."""
    return OdbConfig(
        **draw(budgets()),
        join=join,
        depth=draw(st.integers(1, max_depth)),
        alignment=draw(st.sampled_from(["carry", "max"])),
        split=draw(st.sampled_from(["balanced", "singleton"])),
        capacity=draw(st.one_of(st.none(), st.integers(1, 4))),
        max_wait=draw(st.integers(1, 4)),
        ramp=draw(st.booleans()),
        assignment=draw(st.sampled_from(["shared", "static"])),
        quota=draw(st.sampled_from([0.01, 0.5, 0.9, 1.0])),
        attention_length=draw(st.one_of(st.none(), st.integers(1, 100))),
        steps_multiple=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def small_worlds(draw: st.DrawFn, *, join: bool) -> World:
    """1-4 ranks, up to 30 samples."""
    config = draw(configs(join=join, max_depth=10))
    drawn = draw(samples(30, config.token_budget * 3 // 2))
    dropped = draw(st.sets(st.sampled_from(range(len(drawn))), max_size=5)) if drawn else set()
    return World(config, tuple(drawn), draw(st.integers(1, 4)), frozenset(dropped))


@st.composite
def large_worlds(draw: st.DrawFn, *, join: bool) -> World:
    """5-128 ranks, up to 800 samples of a skewed length distribution; sometimes fewer samples than ranks."""
    config = draw(configs(join=join, max_depth=40))
    rng = random.Random(draw(st.integers(0, 2**32)))
    size = draw(st.one_of(st.integers(0, 100), st.integers(100, 800)))
    spread = draw(st.sampled_from([0.1, 0.7, 1.5]))
    drop_share = draw(st.sampled_from([0.0, 0.05, 0.5]))
    limit = config.token_budget * 3 // 2
    drawn = []
    for i in range(size):
        length = min(limit, max(1, int(config.token_budget / 4 * rng.lognormvariate(0, spread))))
        drawn.append(meta(i, length, rng.choice([0, 0, 1, 8]), loss=rng.randint(0, length)))
    dropped = frozenset(i for i in range(size) if rng.random() < drop_share)
    return World(config, tuple(drawn), draw(st.integers(5, 128)), dropped)
