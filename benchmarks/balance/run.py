"""Replays lengths through every way of batching; see README of `benchmarks/`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.balance.view import shown_world
from benchmarks.errors import BenchmarkError
from benchmarks.lengths import PROFILES
from benchmarks.rows import RowWriter

HELP = "share of ideal time of every way of batching, lengths replayed through the real core"

DEPTH_FREE = ("standard", "sorted", "packing", "gmt")
ONLINE = ("bmt", "paper", "public", "odb", "odb static")
METHODS = (*DEPTH_FREE, *ONLINE)
"""`odb static`: ours, but rank r reads every W-th sample."""
PADDED = "odb padded"
"""Ours, but attention counts nothing in it; measured where it does in the time of a step."""
NOT_WITH_ATTENTION = ("packing", "odb static")
"""Left out there: samples of a packed row would attend to one another, which is no bound."""

ATTENTION_LENGTH = 15001
"""What `odb_attention_length: auto` finds for Qwen3-VL-2B."""
SQUARES = (1 / (2 * ATTENTION_LENGTH), 1 / ATTENTION_LENGTH)
"""Attention at half of what that takes it for, as a causal kernel would at the speed of all else, and at all of it."""

QUICK_WINDOWS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE", help="one whole number a line")
    parser.add_argument(
        "--profile",
        nargs="+",
        default=None,
        choices=(*PROFILES, "sharegpt"),
        help="made profiles; sharegpt: real conversations, real tokenizer (default: all, unless --lengths is given)",
    )
    parser.add_argument("--world", type=int, nargs="+", default=None, help="ranks (default 2 8 64)")
    parser.add_argument("--depth", type=int, nargs="+", default=None, help="samples a rank holds (default 256 1024)")
    parser.add_argument("--budget", type=int, nargs="+", default=None, help="padded tokens (default: the data's own)")
    parser.add_argument("--epochs", type=int, default=None, help="as many seeds (default 2; from 64 ranks on 1)")
    parser.add_argument("--size", type=int, default=None, help="samples of an epoch (default: see README)")
    parser.add_argument("--cutoff", type=int, default=None, help="no sample is longer; of --lengths: the longest")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="of Standard, beside the one of the budget"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--constant", type=float, default=0.0, help="time of a step, in padded tokens")
    parser.add_argument(
        "--square",
        type=float,
        nargs="+",
        default=None,
        metavar="TIME",
        help="time of attention, in padded tokens per (token)^2 (default: 0, and two more with 8 ranks at most)",
    )
    parser.add_argument(
        "--attention-length",
        type=int,
        default=ATTENTION_LENGTH,
        help="attention_length of ODB where attention takes time (default: that of Qwen3-VL-2B)",
    )


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each data, world, depth, budget, seed and method."""
    _check(options)
    methods = _installed(options.methods)
    for case in _cases(options):
        measured_without_depth = False
        for depth in case.depths:
            for method in methods if not case.square else _with_attention(methods):
                if method in DEPTH_FREE and measured_without_depth:
                    continue
                sizes = case.batch_sizes if method == "standard" else case.batch_sizes[:1]
                for batch_size in sizes:
                    _measure_one(rows, case, None if method in DEPTH_FREE else depth, method, batch_size)
            measured_without_depth = True


def _with_attention(methods: Sequence[str]) -> list[str]:
    asked = [method for method in methods if method not in NOT_WITH_ATTENTION]
    return [*asked, PADDED] if "odb" in asked else asked


def _check(options: argparse.Namespace) -> None:
    for name in ("world", "depth", "budget", "batch_sizes"):
        if any(value < 1 for value in getattr(options, name) or ()):
            raise BenchmarkError(f"--{name.replace('_', '-')} must be at least 1.")
    if any(not 0 <= square < math.inf for square in options.square or ()):
        raise BenchmarkError("--square must be at least 0.")
    for name in ("epochs", "size", "cutoff", "attention_length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise BenchmarkError(f"--{name} must be at least 1.")


def _installed(methods: Sequence[str]) -> list[str]:
    from benchmarks.batchers import public_is_installed

    if "public" in methods and not public_is_installed():
        print("online-dynamic-batching is not installed; its rows are left out.", flush=True)
        return [method for method in methods if method != "public"]
    return list(methods)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The same samples for all methods and depths."""

    data: str
    lengths: Sequence[int]
    world: int
    depths: tuple[int, ...]
    budget: int
    cutoff: int
    seed: int
    batch_sizes: tuple[int, ...]
    """The first one is what the budget holds of the longest sample."""
    constant: float
    square: float
    attention_length: int | None
    """Of ODB; None: attention takes no time."""


def _cases(options: argparse.Namespace) -> Iterator[_Case]:
    worlds = options.world or ([2, 8] if options.quick else [2, 8, 64])
    depths = options.depth or ([128] if options.quick else [256, 1024])
    for source in _sources(options):
        for world in worlds:
            size = options.size or source.size_for(world, max(depths))
            if options.quick and not options.size:
                size = min(size, QUICK_WINDOWS * world * max(depths))
            for seed in range(options.seed, options.seed + _epochs(options, world)):
                lengths = source.lengths(size, seed)
                for budget in options.budget or [source.budget]:
                    best = max(1, budget // source.cutoff)
                    # further batch sizes once: they say the same in any world
                    others = options.batch_sizes if world == worlds[0] and seed == options.seed else []
                    for square in _squares(options, world, worlds):
                        yield _Case(
                            data=source.name,
                            lengths=lengths,
                            world=world,
                            depths=tuple(depths) if not square or options.square else tuple(depths[-1:]),
                            budget=budget,
                            cutoff=source.cutoff,
                            seed=seed,
                            batch_sizes=tuple(dict.fromkeys([best, *([] if square else others)])),
                            constant=options.constant,
                            square=square,
                            attention_length=options.attention_length if square else None,
                        )


def _squares(options: argparse.Namespace, world: int, worlds: Sequence[int]) -> Sequence[float]:
    """As asked for; else attention takes time with 8 ranks only, or the most below."""
    if options.square is not None:
        return list(options.square)
    return (0.0, *SQUARES) if world == shown_world(worlds) and not options.quick else (0.0,)


def _epochs(options: argparse.Namespace, world: int) -> int:
    if options.epochs is not None:
        return int(options.epochs)
    return 1 if options.quick or world >= 64 else 2


def _sources(options: argparse.Namespace) -> list[Any]:
    from benchmarks.balance.sources import NAMES, from_file, profile

    names = options.profile
    if names is None:
        names = [] if options.lengths else [name for name in NAMES if not (options.quick and name == "sharegpt")]
    budget = options.budget[0] if options.budget else None
    return [profile(name) for name in names] + [from_file(file, options.cutoff, budget) for file in options.lengths]


def _measure_one(rows: RowWriter, case: _Case, depth: int | None, method: str, batch_size: int) -> None:
    from benchmarks.balance.figures import epoch_figures, online_figures
    from benchmarks.epochs import StepTime

    start = time.process_time()
    epoch, online = _batched(case, depth, method, batch_size)
    model = StepTime(constant=case.constant, per_square=case.square)
    # what a micro-batch of fixed size holds at most is batch size x cutoff, whatever the budget
    most = batch_size * case.cutoff if method in ("standard", "sorted") else case.budget
    settings: dict[str, Any] = {"samples": len(case.lengths), "constant": case.constant, "square": case.square}
    if case.attention_length is not None:
        settings["attention_length"] = case.attention_length if method == "odb" else None
    if method in ("standard", "sorted"):
        settings |= {"batch_size": batch_size, "best": batch_size == case.batch_sizes[0]}
    row = rows.add(
        what="epoch",
        data=case.data,
        method=method,
        ranks=case.world,
        depth=depth,
        budget=case.budget,
        seed=case.seed,
        settings=settings,
        figures=epoch_figures(epoch, most, model) | (online_figures(online) if online else {}),
    )
    name = f"{method} {batch_size}" if method in ("standard", "sorted") else method
    print(
        f"{case.data:11} W={case.world:<3} D={depth or '-':<5} seed {case.seed} {name:11} "
        f"ideal {row.figures['ideal_share']:.4f}  ({time.process_time() - start:.1f} s)",
        flush=True,
    )


def _batched(case: _Case, depth: int | None, method: str, batch_size: int) -> Any:
    """(epoch, what our core says of it or None)"""
    from benchmarks.batchers import METHODS as BATCHERS
    from benchmarks.batchers import Settings
    from benchmarks.batchers.online import PAPER, odb_config, run_online

    own: dict[str, dict[str, Any]] = {
        "odb": {"attention_length": case.attention_length},
        "odb static": {"assignment": "static"},
        PADDED: {},
        "paper": PAPER,
    }
    if method in own:
        more = own[method]
        config = odb_config(depth or 1, case.budget, case.seed, 8, **more)
        online = run_online(case.lengths, config, case.world, by_length=method == "paper")
        return online.epoch, online
    settings = Settings(
        world=case.world,
        budget=case.budget,
        depth=depth or 1,
        batch_size=batch_size,
        cutoff=case.cutoff,
        seed=case.seed,
    )
    return BATCHERS[method](case.lengths, settings), None
