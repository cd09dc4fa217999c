"""Commands of `llamafactory-cli train` one after the other in one process, which saves importing; run by torchrun.

Arguments: a file with a list of argument lists as after `llamafactory-cli train`, and a folder for what becomes of
them: `NUMBER.rank` with the log, whose first line is `done` or `failed`.

With `--parse` the commands are only read, by LLaMA-Factory's own parser, and `NUMBER.rank` holds the values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.trainer.engines import import_deepspeed


def main(jobs: list[list[str]], results: Path, task: Callable[[], str]) -> None:
    """Do them all, whatever happens to one of them."""
    for number, arguments in enumerate(jobs):
        sys.argv = ["llamafactory-cli", *arguments]
        log = io.StringIO()
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                text = f"done\n{task()}"
            except BaseException:
                text = f"failed\n{traceback.format_exc()}"
        (results / f"{number}.{os.environ['RANK']}").write_text(f"{text}\n{log.getvalue()}", encoding="utf-8")


def train() -> str:
    """What `llamafactory-cli train` does in each process of torchrun."""
    from llamafactory.train.tuner import run_exp

    run_exp()
    return ""


def parse() -> str:
    """The arguments as LLaMA-Factory understands them."""
    from llamafactory.hparams import get_train_args

    values = {k: v for part in get_train_args() for k, v in dataclasses.asdict(part).items()}
    return json.dumps(values, default=str)


if __name__ == "__main__":
    import_deepspeed()
    import torch.distributed as dist

    # the runs share a process group: DeepSpeed keeps the first one it saw for the whole life of the process
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None
    main(
        json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")),
        Path(sys.argv[2]),
        parse if "--parse" in sys.argv else train,
    )
    if dist.is_initialized():
        destroy()
