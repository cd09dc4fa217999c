"""A step that runs out of memory says what it was and by how much to lower the budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from odb_factory import OdbConfig, OdbTrainerMixin
from odb_factory.runtime.errors import OdbError
from odb_factory.tools.demo.model import make_text_model
from odb_factory.trainer.out_of_memory import (
    FailedStep,
    Memory,
    OutOfMemory,
    asked_bytes,
    describe,
    explained,
    is_out_of_memory,
    lower_budget,
)
from tests.trainer.tiny import MaskedSamples, pad_collate

GB = 2**30


class OdbTrainer(OdbTrainerMixin, Trainer):
    """What a user of transformers writes."""


class Hungry:
    """From a call on, a batch of several rows (or of one) asks for more memory than there is."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.rows: list[int] = []

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.rows.append(len(kwargs["input_ids"]))
        if len(self.rows) > 2 and (self.rows[-1] == 1) == self.alone:
            torch.empty(2**60, dtype=torch.uint8)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def fail(text_model: Path, output: Path, *, alone: bool, **arguments: Any) -> OutOfMemory:
    torch.set_num_threads(1)
    args = TrainingArguments(str(output), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = OdbTrainer(
        model=AutoModelForCausalLM.from_pretrained(text_model),
        args=args,
        train_dataset=MaskedSamples(40, 100),
        data_collator=pad_collate,
        odb_config=OdbConfig(token_budget=60, depth=8, ramp=False),
        odb_audit=True,
        **arguments,
    )
    trainer.model.register_forward_pre_hook(Hungry(alone), with_kwargs=True)
    with pytest.raises(OutOfMemory) as error:
        trainer.train()
    return error.value


@pytest.mark.parametrize("samples_per_update", [None, 9])
def test_a_group_is_described_and_the_budget_to_try_named(
    text_model: Path, tmp_path: Path, samples_per_update: int | None
) -> None:
    error = fail(text_model, tmp_path, alone=False, odb_samples_per_update=samples_per_update)
    assert isinstance(error, OdbError)
    assert is_out_of_memory(error.__cause__)
    found = re.fullmatch(
        r"rank 0 ran out of memory in update (\d+) \(epoch 1, step (\d+)\) with a micro-batch of (\d+) samples: (\d+) "
        r"padded tokens of the budget's 60, the longest sample (\d+) tokens \(asked for 1,073,741,824.0 GiB, "
        r"[\d,.]+ [GM]iB are there\); lower the budget, by (\d+) % as a first try \(odb_token_budget: (\d+)\), or let "
        r"odb_token_budget: auto find one\.",
        str(error),
    )
    assert found is not None, str(error)
    update, step, samples, padded, longest, percent, budget = map(int, found.groups())
    lines = (tmp_path / "odb_audit.rank0.jsonl").read_text().splitlines() if step else []
    assert len(lines) <= step
    assert all(json.loads(line)["update"] < update for line in lines)
    assert samples >= 2
    assert padded == samples * longest <= 60
    assert budget == int(padded * 0.75)
    assert percent == round(100 * (1 - budget / 60))


def test_a_sample_alone_is_not_helped_by_a_smaller_budget(text_model: Path, tmp_path: Path) -> None:
    text = str(fail(text_model, tmp_path, alone=True))
    assert "with a micro-batch of 1 sample: " in text
    assert (
        "a smaller budget does not help, since this is one sample alone: lower cutoff_len, leave such samples" in text
    )
    assert "odb_overlong: drop" in text
    assert "lower the budget by" not in text


STEP = FailedStep(
    rank=3,
    update=12,
    epoch=1,
    step=40,
    samples=8,
    filler=False,
    padded_tokens=12000,
    longest=1500,
    patches=9000,
    budget=12288,
)


def test_what_was_measured_says_by_how_much() -> None:
    memory = Memory(before=50 * GB, peak=76 * GB, asked=4 * GB, total=74 * GB)  # needs 30 above 50, and 24 are there
    assert memory.share == pytest.approx(0.8)
    text = describe(STEP, memory)
    assert text == (
        "rank 3 ran out of memory in update 12 (epoch 2, step 40) with a micro-batch of 8 samples: 12,000 padded "
        "tokens of the budget's 12,288, the longest sample 1,500 tokens, 9,000 visual patches (asked for 4.0 GiB, "
        "held 76.0 GiB at most, 50.0 GiB of it before the step, 74.0 GiB are there); lower the budget by at least 22 % "
        "(odb_token_budget: 9600)."
    )


@pytest.mark.parametrize(
    ("budget", "padded", "share", "expected"),
    [
        (12288, 12000, 0.5, 5952),  # 6000, to a multiple of 64
        (12288, 12288, 0.99, 11008),  # 10 % at least
        (12288, 20000, 0.9, 11008),
        (12288, 4096, 0.5, 2048),  # it was a small one that failed
        (12288, 12288, None, 9216),
        (100, 80, None, 60),
        (1, 1, 0.1, 1),
    ],
)
def test_a_lower_budget(budget: int, padded: int, share: float | None, expected: int) -> None:
    assert lower_budget(budget, padded, share) == expected


@pytest.mark.parametrize(
    "memory",
    [
        Memory(before=10, peak=None, total=20),
        Memory(before=None, peak=10, total=20),
        Memory(before=10, peak=20),
        Memory(before=10, peak=10, total=20),
        Memory(before=30, peak=40, total=20),
    ],
)
def test_a_share_that_is_not_known(memory: Memory) -> None:
    assert memory.share is None
    assert "lower the budget, by 27 % as a first try (odb_token_budget: 8960), or let" in describe(STEP, memory)


def test_a_filler_is_called_so() -> None:
    import dataclasses

    text = describe(dataclasses.replace(STEP, samples=0, filler=True, patches=0), Memory())
    assert "with a micro-batch of a filler, which repeats one sample: 12,000 padded tokens" in text
    assert "a smaller budget does not help" in text
    images = describe(dataclasses.replace(STEP, samples=1), Memory())
    assert "lower cutoff_len or image_max_pixels, leave" in images


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of ..."), 2 * GB),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
            ),
            4096,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 123 bytes."), 123),
        (MemoryError(), None),
    ],
)
def test_errors_that_say_so(error: Exception, expected: int | None) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(str(error)) == expected
    with pytest.raises(OutOfMemory) as raised, explained(torch.device("cpu"), lambda: STEP):
        raise error
    assert raised.value.__cause__ is error


def test_other_errors_pass() -> None:
    for error in (RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), OdbError("out of memory")):
        with pytest.raises(type(error)) as raised, explained(torch.device("cpu"), lambda: STEP):
            raise error
        assert raised.value is error
