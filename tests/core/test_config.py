"""The configuration."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from odb_factory.config import LOCAL_FIELDS, OdbConfig
from odb_factory.option import options_of

POSITIVE = ["token_budget", "depth", "max_wait", "steps_multiple", "queue_steps", "pad_to_multiple_of"]
OPTIONAL = ["max_samples", "max_patches", "capacity", "window_bytes", "attention_length"]
BOOLEAN = ["join", "ramp", "shuffle"]
CHOICES = {name: option.choices for name, option in options_of(OdbConfig).items() if option.choices}

INVALID: list[tuple[str, Any]] = [
    *((name, value) for name in POSITIVE for value in (0, -1, 1.5, True, "8", None)),
    *((name, value) for name in OPTIONAL for value in (0, -1, 1.5, True, "8")),
    *((name, value) for name in BOOLEAN for value in (0, 1, "true", None)),
    *((name, value) for name in CHOICES for value in ("", "none", None, 1)),
    *((name, value) for name in ("dummy_tokens", "port") for value in (-1, 1.5, True, "8", None)),
    ("port", 65536),
    *(("max_bad_samples", value) for value in (-1, 1.5, True, "8")),
    *(("quota", value) for value in (0, -0.5, 1.01, float("nan"), True, "1", None)),
    *(("seed", value) for value in (1.5, True, "8", None)),
    *(("timeout", value) for value in (0, -1.0, float("nan"), True, "8", None)),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=lambda part: repr(part) if not isinstance(part, str) else part)
def test_an_invalid_field_is_refused_by_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {value!r}\.$"):
        OdbConfig(**{"token_budget": 100, name: value})


def test_the_invalid_values_cover_every_field() -> None:
    assert {name for name, _ in INVALID} == {field.name for field in dataclasses.fields(OdbConfig)}


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name, allowed in CHOICES.items() for value in allowed),
        *({name: value} for name in OPTIONAL for value in (None, 1)),
        *({name: value} for name in BOOLEAN for value in (True, False)),
        *({name: 1} for name in POSITIVE),
        {"dummy_tokens": 0},
        {"port": 65535},
        {"max_bad_samples": 0},
        {"max_bad_samples": None},
        {"quota": 1},
        {"quota": 0.01},
        {"seed": -5},
        {"timeout": 1},
        {"timeout": 0.5},
        {"token_budget": 8, "pad_to_multiple_of": 8},
    ],
    ids=str,
)
def test_every_allowed_value_is_taken_as_it_is(values: dict[str, Any]) -> None:
    config = OdbConfig(**{"token_budget": 100} | values)
    assert {name: getattr(config, name) for name in values} == values


def test_a_budget_below_the_pad_multiple_is_refused_since_no_sample_would_fit() -> None:
    with pytest.raises(ValueError, match="token_budget 7 is smaller than pad_to_multiple_of 8"):
        OdbConfig(token_budget=7, pad_to_multiple_of=8)


def test_a_mapping_gives_the_same_config_as_keywords() -> None:
    values = {"token_budget": 100, "depth": 7, "split": "singleton"}
    assert OdbConfig.from_mapping(values) == OdbConfig(token_budget=100, depth=7, split="singleton")


def test_an_unknown_key_is_refused_by_its_name_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'dept'.*known: .*\bdepth\b"):
        OdbConfig.from_mapping({"token_budget": 100, "dept": 7})


def test_a_mapping_without_a_budget_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="token_budget is missing"):
        OdbConfig.from_mapping({"depth": 7})


def test_the_config_cannot_be_changed_after_validation() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OdbConfig(token_budget=100).depth = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("depth", "ramp", "targets"),
    [
        (256, True, [32, 64, 128, 256, 256]),
        (256, False, [256, 256, 256, 256, 256]),
        (20, True, [2, 5, 10, 20, 20]),
        (3, True, [1, 1, 1, 3, 3]),
        (1, True, [1, 1, 1, 1, 1]),
    ],
)
def test_the_window_grows_to_the_depth_over_the_first_rounds(depth: int, ramp: bool, targets: list[int]) -> None:
    config = OdbConfig(token_budget=100, depth=depth, ramp=ramp)
    assert [config.window_target(number) for number in range(5)] == targets


def test_the_capacity_bounds_nothing_unless_it_is_set() -> None:
    assert OdbConfig(token_budget=100, depth=9).groups_per_round == 9
    assert OdbConfig(token_budget=100, depth=9, capacity=2).groups_per_round == 2


OTHER: dict[str, Any] = {
    "token_budget": 101,
    "depth": 255,
    "alignment": "max",
    "split": "singleton",
    "join": False,
    "overlong": "drop",
    "max_samples": 4,
    "max_patches": 4,
    "attention_length": 15000,
    "pad_to_multiple_of": 8,
    "dummy_tokens": 4,
    "idle": "skip",
    "capacity": 4,
    "max_wait": 9,
    "ramp": False,
    "steps_multiple": 2,
    "queue_steps": 5,
    "timeout": 60.0,
    "shuffle": False,
    "seed": 1,
    "start_method": "spawn",
    "assignment": "static",
    "quota": 0.5,
    "window_bytes": 1000,
    "on_bad_sample": "skip",
    "max_bad_samples": 3,
    "port": 4000,
}


def test_the_fingerprint_differs_with_every_field_that_matters() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(OdbConfig)}
    base = OdbConfig(token_budget=100)
    prints = {name: dataclasses.replace(base, **{name: value}).fingerprint() for name, value in OTHER.items()}
    local = {prints.pop(name) for name in LOCAL_FIELDS}
    assert local == {base.fingerprint()}
    assert len({base.fingerprint(), *prints.values()}) == len(prints) + 1


def test_the_fingerprint_is_equal_for_equal_configs_and_fits_an_exchange() -> None:
    a, b = OdbConfig(token_budget=100), OdbConfig.from_mapping({"token_budget": 100})
    assert a.fingerprint() == b.fingerprint()
    assert 0 <= a.fingerprint() < 2**31


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = "from odb_factory.config import OdbConfig; print(OdbConfig(token_budget=100).fingerprint())"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert prints == {b"%d\n" % OdbConfig(token_budget=100).fingerprint()}
