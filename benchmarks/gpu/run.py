"""`python -m benchmarks gpu`: what a GPU makes of every way of batching, without LLaMA-Factory."""

from __future__ import annotations

import argparse
import os
import time

from benchmarks.errors import BenchmarkError
from benchmarks.rows import RowWriter

HELP = "train a random model of Qwen3-VL-2B's shape on one CUDA GPU (or a tiny one on CPUs) by every method"

CELLS = "ultrachat:text,llava:image,sharegpt4o:image,mm_mix:image"
QUICK_CELLS = "ultrachat:text,llava:image"
BUDGETS = "8192,16384,32768"
QUICK_BUDGETS = "8192,16384"
METHODS = ("standard", "odb", "packing", "public")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: CUDA if it is there"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny model and short lengths; always so on a CPU")
    parser.add_argument("--cells", metavar="PROFILE:KIND,...", help=f"kinds: text, image; default {CELLS}")
    parser.add_argument("--methods", metavar="NAME,...", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument(
        "--budgets",
        metavar="N,...",
        help=f"padded tokens, for the tiny model divided by 16; default {BUDGETS}, with --quick {QUICK_BUDGETS}",
    )
    parser.add_argument("--depth", type=int, default=1024, help="samples that a window holds (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that read samples; default: half the cores, at most 8")
    parser.add_argument(
        "--attention",
        choices=("causal", "masked"),
        default="causal",
        help="masked: padded batches bring a mask, as LLaMA-Factory's do; no flash kernel takes one",
    )
    parser.add_argument("--seconds-per-config", type=float, metavar="S", help="default: 8; with --quick 4, tiny 1")
    parser.add_argument("--minutes", type=float, help="no method begins later; default: 7, with --quick 1.5")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """Raises:
    BenchmarkError: no such device, cell or method.
    """
    begun = time.monotonic()
    cells = _cells(options)
    methods = tuple(options.methods.split(","))
    if unknown := set(methods) - set(METHODS):
        raise BenchmarkError(f"no such method: {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}.")
    from benchmarks.gpu.cell import TINY_SCALE, Cell, Plan
    from benchmarks.gpu.machine import set_up, wants_tiny

    tiny = options.tiny or wants_tiny(options.device)
    machine = set_up(options.device, tiny, options.seed)
    plan = Plan(
        budgets=tuple(sorted(budget // (TINY_SCALE if tiny else 1) for budget in _budgets(options))),
        methods=methods,
        depth=options.depth,
        workers=options.workers or max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
        seconds=options.seconds_per_config or _seconds(options.quick, tiny),
        masked=options.attention == "masked",
        tiny=tiny,
        seed=options.seed,
    )
    end = begun + 60 * (options.minutes or (1.5 if options.quick else 7.0))
    for number, (profile, what) in enumerate(cells):
        # each has an equal share of what time is left
        now = time.monotonic()
        if now > end:
            print(f"{profile} {what} is left out, since time is up", flush=True)
            continue
        until = now + (end - now) / (len(cells) - number)
        Cell(machine, plan, profile, what, until, rows).measure()


def _cells(options: argparse.Namespace) -> list[tuple[str, str]]:
    from benchmarks.gpu.data import CONTENTS

    cells = []
    for text in (options.cells or (QUICK_CELLS if options.quick else CELLS)).split(","):
        profile, _, what = text.partition(":")
        if profile not in CONTENTS or what not in ("text", "image"):
            raise BenchmarkError(f"{text!r} is no cell; give PROFILE:text or PROFILE:image of {', '.join(CONTENTS)}.")
        cells.append((profile, what))
    return cells


def _budgets(options: argparse.Namespace) -> list[int]:
    text = options.budgets or (QUICK_BUDGETS if options.quick else BUDGETS)
    try:
        budgets = [int(number) for number in text.split(",")]
    except ValueError:
        budgets = [0]
    if min(budgets) < 1024:
        raise BenchmarkError(f"--budgets {text}: give whole numbers of at least 1024, as in {QUICK_BUDGETS}.")
    return budgets


def _seconds(quick: bool, tiny: bool) -> float:
    if tiny:
        return 1.0
    return 4.0 if quick else 8.0
