"""v1's registry in both shapes, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from odb_factory.llamafactory.seams import SeamError
from odb_factory.llamafactory.v1.registry import METHODS, register_strategy
from odb_factory.llamafactory.v1.strategy import OdbBatching


class StandInSuccessor:
    """A stand-in for the registry of 0.9.5's successor: its published interface (`v1/utils/plugin.py` of the main
    branch), one object under each name of a family, whose attributes are the methods."""

    _registry: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls._registry = {}

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def register(self) -> Callable[[Any], Any]:
        def decorator(registered: Any) -> Any:
            type(self)._registry[self.name or ""] = registered
            return registered

        return decorator

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self)._registry[self.name or ""], name)


class StandInBatchingPlugin(StandInSuccessor):
    pass


class UnknownPlugin:
    """A registry of a third shape."""

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self, implementation: Any, *, replace: bool = False) -> None:
        raise AssertionError("must not be called")


def installed() -> Any:
    from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin

    return BatchingPlugin


def test_the_installed_registry_holds_the_four_methods() -> None:
    for method in METHODS:
        assert installed()("odb")[method] is getattr(OdbBatching, method)


@pytest.mark.parametrize("plugin", [installed, lambda: StandInBatchingPlugin], ids=["installed", "successor"])
def test_both_shapes_route_every_method(plugin: Callable[[], Any]) -> None:
    class Echo:
        get_data_provider_batch_size = staticmethod(lambda *a: ("size", a))
        compute_length = staticmethod(lambda *a: ("length", a))
        fill_buffer = staticmethod(lambda *a: ("fill", a))
        generate_batch = staticmethod(lambda *a: ("batch", a))

    register_strategy(plugin(), "echo", Echo)
    try:
        strategy = plugin()("echo")
        assert strategy.get_data_provider_batch_size(1) == ("size", (1,))
        assert strategy.compute_length(1, 2) == ("length", (1, 2))
        assert strategy.fill_buffer(1, 2, 3) == ("fill", (1, 2, 3))
        assert strategy.generate_batch(1, 2) == ("batch", (1, 2))
    finally:
        plugin()._registry.pop("echo")


def test_an_unknown_shape_is_refused_with_the_versions() -> None:
    with pytest.raises(SeamError) as caught:
        register_strategy(UnknownPlugin, "odb", OdbBatching)
    text = str(caught.value)
    assert "UnknownPlugin has register(implementation: Any, *, replace: bool = False)" in text.replace("'", "")
    assert "tested with LLaMA-Factory 0.9.5, this is 0.9.5" in text


def test_the_other_strategies_are_as_they_were() -> None:
    for name in ("padding_free", "dynamic_batching", "dynamic_padding_free"):
        for method in METHODS:
            assert installed()(name)[method].__module__ == "llamafactory.v1.plugins.trainer_plugins.batching"
    with pytest.raises(ValueError, match="Method fill_buffer of plugin nonsense is not registered"):
        installed()("nonsense").fill_buffer(None, None, None)


def test_the_strategy_refuses_a_trainer_that_is_not_ours() -> None:
    info = {"micro_batch_size": 1, "num_micro_batch": 1, "cutoff_len": 16}
    with pytest.raises(ValueError, match="odb works with `llamafactory-cli sft` only; choose another strategy"):
        installed()("odb").get_data_provider_batch_size(info)
