"""Standard batches against Online Dynamic Batching on real conversations with the real Qwen tokenizer.

    python -m benchmarks.real_input --work-dir DIR

Both trainings go through the stock `llamafactory-cli train` on two gloo ranks, one after the other: the same
conversations, model, seed and memory (the worst case `batch size x cutoff_len` is the token budget). The model is tiny
and random, but its vocabulary is Qwen's, so that almost all time goes into the logits: time per padded token is about
constant, which is what batching can save. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import platform
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.launch import Finished, available_gib, read_log, train
from benchmarks.qwen_tokenizer import MODEL_VOCABULARY
from benchmarks.real_setup import CUTOFF, METHODS, Lengths, Place, prepare
from benchmarks.real_steps import read_audit, replay_standard

RANKS = 2
MEMORY_SECONDS = 120.0
"""How long to wait for memory that other programs hold."""
PACKAGES = ("torch", "transformers", "llamafactory", "accelerate", "datasets", "tokenizers", "odb-factory")
SHOWN = (
    "samples",
    "steps",
    "fillers",
    "runtime_s",
    "samples_per_s",
    "padded_tokens",
    "padding",
    "ideal_share",
    "loss_first",
    "loss_last",
    "loss_mean",
    "wall_s",
    "first_step_s",
    "cpu_s",
    "peak_rss_gib",
)
"""Fields of a row that are printed."""


@dataclass(frozen=True)
class Row:
    """One training. `tokens` are real tokens, `padded_tokens` what the model ran on, both over all ranks."""

    method: str
    ranks: int
    budget: int
    samples: int
    unique: int
    repeated: int
    steps: int
    fillers: int
    """Zero-weight micro-batches of ranks without a group; not in `padded_tokens`."""
    runtime_s: float
    """`train_runtime`: the training loop alone."""
    samples_per_s: float
    """Samples trained on / `runtime_s`."""
    tokens: int
    padded_tokens: int
    padding: float
    """Share of `padded_tokens`."""
    ideal_share: float
    """Real tokens / (ranks x sum over steps of the slowest rank's padded tokens)."""
    loss_first: float
    loss_last: float
    loss_mean: float
    wall_s: float
    """The whole command: imports, data, training, saving."""
    first_step_s: float
    """From the start of the command to the end of the first step."""
    cpu_s: float
    """Processor time of all its processes."""
    others_share: float
    """Share of the machine that other programs took meanwhile; where it is not small, compare `cpu_s`."""
    peak_rss_gib: float
    left_behind: list[str]
    versions: dict[str, str]
    date: str


def run(place: Place, method: str, deadline: float) -> Finished:
    """Train with one method."""
    print(f"Training with {method} ...", flush=True)
    finished = train(
        place.recipe(method),
        name=method,
        ranks=RANKS,
        output_dir=place.output(method),
        cache=place.cache(method),
        console=place.console(method),
        deadline=deadline,
    )
    for process in finished.left_behind:
        print(f"  warning: {method} left this process behind: {process}", flush=True)
    return finished


def make_row(place: Place, method: str, finished: Finished, lengths: Lengths, batch_size: int) -> Row:
    """The row of a finished training, checked against the lengths and, with ODB, the audit files."""
    output = place.output(method)
    results = json.loads((output / "all_results.json").read_text())
    state = json.loads((output / "trainer_state.json").read_text())
    padded = int(state["num_input_tokens_seen"])
    budget = batch_size * CUTOFF
    if method == "odb":
        ran = read_audit(output, lengths, ranks=RANKS, budget=budget, padded=padded, steps=state["global_step"])
    else:
        ran = replay_standard(lengths, ranks=RANKS, batch_size=batch_size, padded=padded)
    emitted = ran.emitted()
    tokens = sum(lengths.tokens[index] * times for index, times in emitted.items())
    losses = [row["loss"] for row in read_log(output / "trainer_log.jsonl")]
    samples = emitted.total()
    return Row(
        method=method,
        ranks=RANKS,
        budget=budget,
        samples=samples,
        unique=len(emitted),
        repeated=samples - len(emitted),
        steps=state["global_step"],
        fillers=ran.fillers,
        runtime_s=results["train_runtime"],
        samples_per_s=round(samples / results["train_runtime"], 4),
        tokens=tokens,
        padded_tokens=padded,
        padding=round(1 - tokens / padded, 4),
        ideal_share=round(ran.ideal_share(), 4),
        loss_first=round(losses[0], 4),
        loss_last=round(losses[-1], 4),
        loss_mean=round(results["train_loss"], 4),
        wall_s=round(finished.wall_s, 2),
        first_step_s=round(finished.first_step_s, 2),
        cpu_s=round(finished.cpu_s, 1),
        others_share=round(finished.others_share, 3),
        peak_rss_gib=round(finished.peak_rss_gib, 2),
        left_behind=finished.left_behind,
        versions={"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def report(rows: list[Row], lengths: Lengths, file: Path) -> None:
    """Print the comparison and write the JSON."""
    standard, odb = rows
    ratios = {
        "samples_per_s": odb.samples_per_s / standard.samples_per_s,
        "samples_per_wall_s": (odb.samples / odb.wall_s) / (standard.samples / standard.wall_s),
        "samples_per_cpu_s": (odb.samples / odb.cpu_s) / (standard.samples / standard.cpu_s),
        "ideal_share": odb.ideal_share / standard.ideal_share,
        "padded_tokens": odb.padded_tokens / standard.padded_tokens,
    }
    content = {
        "lengths": lengths.statistics(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "ratio_odb_over_standard": {name: round(value, 4) for name, value in ratios.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print("\n" + f"{'':<20}" + "".join(f"{row.method:>14}" for row in rows))
    for name in SHOWN:
        print(f"{name:<20}" + "".join(f"{getattr(row, name):>14,}" for row in rows))
    print("ODB / Standard: " + ", ".join(f"{name} {value:.3f}" for name, value in ratios.items()))
    if max(row.others_share for row in rows) > 0.05:
        shares = ", ".join(f"{row.others_share:.0%} during {row.method}" for row in rows)
        print(f"Other programs took a share of the processors ({shares}): compare processor time rather than seconds.")
    print(f"Written to {file}")


def check_memory(batch_size: int) -> None:
    """Wait for memory, or raise BenchmarkError: a backward pass holds three float32 copies of the logits."""
    needed = RANKS * (3 * batch_size * CUTOFF * MODEL_VOCABULARY * 4 / 2**30 + 1)
    end = time.monotonic() + MEMORY_SECONDS
    while (there := available_gib()) < needed:
        if time.monotonic() > end:
            raise BenchmarkError(
                f"about {needed:.0f} GiB of memory are needed and {there:.0f} are available; end other programs or "
                "pass a smaller --batch-size."
            )
        print(f"Waiting for {needed:.0f} GiB of memory, {there:.0f} are available ...", flush=True)
        time.sleep(10)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_input", description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for model, data, recipes, logs and outputs")
    parser.add_argument("--conversations", type=int, default=300, help="how many, from the data set's start")
    parser.add_argument("--batch-size", type=int, default=2, help=f"of Standard, per rank; the budget is x {CUTOFF}")
    parser.add_argument("--json", type=Path, help="result file; default: real_input.json in the work directory")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds that one training may take")
    parser.add_argument("--prepare-only", action="store_true", help="make everything, but train nothing")
    parsed = parser.parse_args()
    world_batch = RANKS * max(1, parsed.batch_size)
    if parsed.batch_size < 1 or parsed.conversations < 1 or parsed.conversations % world_batch:
        wanted = world_batch * max(1, math.ceil(parsed.conversations / world_batch))
        parser.error(
            f"--conversations must be a multiple of ranks x batch size = {world_batch}, so that Standard trains on "
            f"each exactly once; take {wanted}."
        )
    return parsed


def main() -> None:
    """Run the benchmark."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated."))  # what was started is ended on the way out
    place = Place(options.work_dir.resolve())
    try:
        lengths = prepare(place, options.conversations, options.batch_size)
        print("Lengths: " + ", ".join(f"{name} {value:g}" for name, value in lengths.statistics().items()), flush=True)
        if options.prepare_only:
            return
        rows = []
        for method in METHODS:
            check_memory(options.batch_size)
            finished = run(place, method, options.deadline)
            rows.append(make_row(place, method, finished, lengths, options.batch_size))
        report(rows, lengths, options.json or place.root / "real_input.json")
    except BenchmarkError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
