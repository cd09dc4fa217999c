"""Lengths to replay: profiles with the variation of the paper's data sets, a file, or real conversations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.errors import BenchmarkError

SHORTEST = 16

SHORT_MODE = 0.15
"""Where the short mode lies, as a share of the long one."""


@dataclass(frozen=True)
class Profile:
    """A made distribution of observed lengths (tokens).

    The coefficient of variation is the paper's; means and longest samples are not published and are our choice: what
    these data sets come to with Qwen's tokenizer and visual tokens, roughly.
    """

    size: int
    """Samples of the paper's data set."""
    cv: float
    mean: int
    longest: int
    """Samples are cut off here (cutoff_len)."""
    short_share: float = 0.0
    """Share of samples that form a second, short mode."""


PROFILES = {
    "ultrachat": Profile(size=200_000, cv=0.48, mean=1200, longest=4096),
    "llava": Profile(size=150_000, cv=0.29, mean=600, longest=4096),
    "sharegpt4o": Profile(size=57_000, cv=1.00, mean=1500, longest=8192),
    "mm_mix": Profile(size=196_200, cv=0.80, mean=750, longest=4096, short_share=0.45),
}


def draw(name: str, size: int, seed: int = 0) -> list[int]:
    """`size` lengths of a named profile: log-normal around each mode, cut off at `longest`, with its mean and CV.

    Raises:
        BenchmarkError: no such profile.
    """
    if name not in PROFILES:
        raise BenchmarkError(f"there is no profile of lengths named {name!r}; there are {', '.join(PROFILES)}.")
    return draw_of(PROFILES[name], size, (seed, *name.encode()))


def draw_of(profile: Profile, size: int, seed: Sequence[int]) -> list[int]:
    """The same of any profile. `seed` alone decides the random numbers: with the same one, profiles compare well."""
    scale, sigma = _fitted(profile)
    values: list[int] = _lengths(profile, np.random.default_rng(tuple(seed)), size, scale, sigma).tolist()
    return values


def _lengths(profile: Profile, rng: np.random.Generator, size: int, scale: float, sigma: float) -> np.ndarray:
    """(size,) whole numbers."""
    normals, uniforms = rng.standard_normal(size), rng.random(size)
    modes = np.where(uniforms < profile.short_share, SHORT_MODE, 1.0)
    values = np.rint(scale * modes * np.exp(sigma * normals)).astype(np.int64)
    return np.clip(values, SHORTEST, profile.longest)


@functools.cache
def _fitted(profile: Profile) -> tuple[float, float]:
    """Scale (tokens) and sigma with which a large draw has the profile's mean and CV."""

    def moments(scale: float, sigma: float) -> tuple[float, float]:
        values = _lengths(profile, np.random.default_rng(0), 50_000, scale, sigma)
        return float(values.mean()), float(values.std() / values.mean())

    scale, sigma = float(profile.mean), profile.cv
    for _ in range(6):
        scale = _bisect(lambda x, s=sigma: moments(x, s)[0] - profile.mean, 1.0, 8.0 * profile.mean)  # type: ignore[misc]
        sigma = _bisect(lambda x, s=scale: moments(s, x)[1] - profile.cv, 0.01, 3.0)  # type: ignore[misc]
    return scale, sigma


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def read_lengths(file: Path) -> list[int]:
    """Lengths from a file, one whole number a line.

    Raises:
        BenchmarkError: a line is not a positive whole number; names it.
    """
    lengths = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip().isdecimal() or int(line) < 1:
            raise BenchmarkError(
                f"{file}, line {number}: {line.strip()!r} is not a length in tokens; give one whole number a line."
            )
        lengths.append(int(line))
    if not lengths:
        raise BenchmarkError(f"{file} holds no lengths; give one whole number a line.")
    return lengths
