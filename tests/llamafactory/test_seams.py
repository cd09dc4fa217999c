"""Seams and what is installed at them: exactly the expected ones, checked first, reversible, invisible to others."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odb_factory.llamafactory import activate, autoload
from odb_factory.llamafactory.seams import (
    PREPROCESS,
    RUN_SFT,
    SEAMS,
    TRAIN_ARGS,
    TRAINER,
    V1_ARGS,
    V1_TRAINER,
    Registry,
    Seam,
    SeamError,
    registry,
)
from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.helpers import RECIPE, train_args


@pytest.fixture(autouse=True)
def imported() -> Iterator[None]:
    """LLaMA-Factory is imported, and whatever a test does, our hooks are as the import left them."""
    import llamafactory.train.tuner  # noqa: F401

    before = registry.installed
    assert of_v0(before) == (TRAIN_ARGS, RUN_SFT)
    yield
    assert of_v0(registry.installed) == of_v0(before)


def of_v0(seams: tuple[Seam, ...]) -> tuple[Seam, ...]:
    """Without those of v1, which another test of this process may have imported."""
    return tuple(seam for seam in seams if seam in SEAMS)


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> str:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9" if name == "llamafactory" else real(name))
    return "0.9.9"


def at(seam: Seam) -> Any:
    return getattr(importlib.import_module(seam.module), seam.name)


# -- what is installed, and when


def test_import_touches_two_seams() -> None:
    from llamafactory.hparams.finetuning_args import FinetuningArguments

    from odb_factory.llamafactory.arguments import OdbFinetuningArguments

    assert at(RUN_SFT) is activate.run_sft
    assert registry.original(RUN_SFT).__module__ == "llamafactory.train.sft.workflow"
    stock = registry.original(TRAIN_ARGS)
    assert stock.count(FinetuningArguments) == 1
    assert at(TRAIN_ARGS) == [OdbFinetuningArguments if c is FinetuningArguments else c for c in stock]
    assert at(PREPROCESS).__module__ == "llamafactory.data.loader"
    assert at(TRAINER).__module__ == "llamafactory.train.sft.trainer"


class Watch:
    """In place of stock `run_sft`: notes what stands at the seams while a run lasts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.installed: tuple[Seam, ...] = ()
        self.values: dict[Seam, Any] = {}

    def __call__(self, *_: Any) -> None:
        self.installed = registry.installed
        self.values = {seam: at(seam) for seam in SEAMS}
        if self.error is not None:
            raise self.error


def run_with(monkeypatch: pytest.MonkeyPatch, watch: Watch, demo: DemoPaths, tmp_path: Path, **fields: Any) -> None:
    from llamafactory.train import tuner

    paths = {"model_name_or_path": str(demo.model), "dataset_dir": str(demo.data), "output_dir": str(tmp_path / "out")}
    arguments = train_args({**RECIPE, **paths, **fields})
    with monkeypatch.context() as patch:
        patch.setitem(registry._originals, RUN_SFT, watch)
        tuner.run_sft(*arguments, [])


@pytest.mark.parametrize("error", [None, KeyError("in the run")])
def test_a_run_touches_two_more_and_puts_them_back(
    monkeypatch: pytest.MonkeyPatch, demo: DemoPaths, tmp_path: Path, error: Exception | None
) -> None:
    before, watch = {seam: at(seam) for seam in SEAMS}, Watch(error)
    if error is None:
        run_with(monkeypatch, watch, demo, tmp_path, odb=True)
    else:
        with pytest.raises(KeyError, match="in the run"):
            run_with(monkeypatch, watch, demo, tmp_path, odb=True)
    assert of_v0(watch.installed) == SEAMS == (TRAIN_ARGS, RUN_SFT, PREPROCESS, TRAINER)
    assert {seam for seam in SEAMS if watch.values[seam] is not before[seam]} == {PREPROCESS, TRAINER}
    assert all(at(seam) is before[seam] for seam in SEAMS)


def test_a_stock_run_touches_nothing_more(monkeypatch: pytest.MonkeyPatch, demo: DemoPaths, tmp_path: Path) -> None:
    watch = Watch()
    run_with(monkeypatch, watch, demo, tmp_path)
    assert of_v0(watch.installed) == (TRAIN_ARGS, RUN_SFT)
    assert watch.values[PREPROCESS].__module__ == "llamafactory.data.loader"


def test_duplicates_raise() -> None:
    before = at(TRAIN_ARGS)
    with pytest.raises(RuntimeError, match=r"the seam llamafactory\.hparams\.parser\._TRAIN_ARGS is replaced already"):
        registry.install(TRAIN_ARGS, [])
    assert at(TRAIN_ARGS) is before
    with pytest.raises(RuntimeError, match="is replaced already"), registry.replaced({TRAINER: print, RUN_SFT: print}):
        raise AssertionError
    assert at(TRAINER).__module__ == "llamafactory.train.sft.trainer"  # the first of the two was put back


def test_restore_all_puts_the_originals_back() -> None:
    ours = {seam: at(seam) for seam in registry.installed}
    originals = {seam: registry.original(seam) for seam in registry.installed}
    registry.restore_all()
    try:
        assert registry.installed == ()
        assert {seam: at(seam) for seam in ours} == originals
        assert not set(map(id, ours.values())) & set(map(id, originals.values()))
    finally:
        for seam in ours:
            activate.after_import(importlib.import_module(seam.module))
    assert at(RUN_SFT) is ours[RUN_SFT]
    assert at(TRAIN_ARGS) == ours[TRAIN_ARGS]


# -- what does not fit


@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_missing_seam_is_named(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> None:
    monkeypatch.delattr(importlib.import_module(seam.module), seam.name)
    with pytest.raises(SeamError, match=f"the seam {seam} is missing .tested with LLaMA-Factory 0.9.5, this is 0.9.5"):
        Registry().install(seam, None)


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.parameters], ids=str)
def test_other_shape_is_named(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> None:
    def other(*, something: int) -> None: ...

    monkeypatch.setattr(importlib.import_module(seam.module), seam.name, other)
    with pytest.raises(SeamError, match=f"the seam {seam} has no parameter {seam.parameters[0]} .tested with"):
        Registry().install(seam, None)
    assert at(seam) is other


@pytest.mark.parametrize("seam", [PREPROCESS, TRAINER], ids=str)
def test_run_with_odb_on_a_missing_seam(
    monkeypatch: pytest.MonkeyPatch, demo: DemoPaths, tmp_path: Path, seam: Seam
) -> None:
    watch, before = Watch(), at(seam)
    with monkeypatch.context() as patch:
        patch.delattr(importlib.import_module(seam.module), seam.name)
        with pytest.raises(SeamError, match=str(seam)):
            run_with(monkeypatch, watch, demo, tmp_path, odb=True)
        assert not watch.values
        run_with(monkeypatch, w := Stub(), demo, tmp_path)  # without odb nobody asks
        assert w.called
    assert at(seam) is before


class Stub(Watch):
    """A stock run that looks at no seam."""

    called = False

    def __call__(self, *_: Any) -> None:
        self.called = True


def test_run_with_odb_on_another_version(
    monkeypatch: pytest.MonkeyPatch, demo: DemoPaths, tmp_path: Path, other_version: str
) -> None:
    watch = Watch()
    with pytest.raises(
        SeamError, match=rf"seams .*run_sft.* were tested with LLaMA-Factory 0\.9\.5, this is {other_version}; install"
    ):
        run_with(monkeypatch, watch, demo, tmp_path, odb=True)
    assert not watch.values
    run_with(monkeypatch, watch, demo, tmp_path)
    assert watch.values


def test_fields_are_known_in_another_version_that_looks_alike(
    monkeypatch: pytest.MonkeyPatch, other_version: str
) -> None:
    """Else `odb: true` would end as an unknown key there, without a word on versions."""
    stock = registry.original(TRAIN_ARGS)
    monkeypatch.setattr(importlib.import_module(TRAIN_ARGS.module), TRAIN_ARGS.name, stock)
    fresh = Registry()
    monkeypatch.setattr(activate, "registry", fresh)
    activate.after_import(importlib.import_module(TRAIN_ARGS.module))
    assert fresh.installed == (TRAIN_ARGS,)
    assert any(c.__name__ == "OdbFinetuningArguments" for c in at(TRAIN_ARGS))


@pytest.mark.parametrize("seam", [TRAIN_ARGS, RUN_SFT], ids=str)
def test_import_of_another_layout_only_warns(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> None:
    """Whatever goes wrong: stock LLaMA-Factory must start."""

    def fail(self: Any, seam: Seam, replacement: Any) -> None:
        raise ImportError("something moved")

    monkeypatch.setattr(importlib.import_module(seam.module), seam.name, registry.original(seam))
    monkeypatch.setattr(Registry, "install", fail)
    with pytest.warns(RuntimeWarning, match="odb-factory is inactive: something moved"):
        activate.after_import(importlib.import_module(seam.module))


def test_source_tree_without_a_version_is_refused_with_odb_only(
    monkeypatch: pytest.MonkeyPatch, demo: DemoPaths, tmp_path: Path
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    watch = Watch()
    with pytest.raises(SeamError, match="this is of unknown version"):
        run_with(monkeypatch, watch, demo, tmp_path, odb=True)
    run_with(monkeypatch, watch, demo, tmp_path)
    assert watch.values


def test_other_modules_are_left_alone() -> None:
    before = registry.installed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activate.after_import(importlib.import_module("llamafactory.extras.misc"))
    assert registry.installed == before


# -- the import hook


@pytest.mark.parametrize(
    ("value", "off"), [("1", True), ("true", True), ("YES", True), ("0", False), ("false", False), ("", False)]
)
def test_disable_variable(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv("ODB_FACTORY_DISABLE", value)
    assert autoload.disabled() == off


def python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_unrelated_program_imports_nothing_of_ours() -> None:
    shown = python("""
        import json, unittest, sys
        heavy = sorted(m for m in sys.modules if m.partition(".")[0] in ("odb_factory", "llamafactory", "torch"))
        print(heavy, any(getattr(f, "__name__", "") == "OdbFactoryHook" for f in sys.meta_path))
    """)
    assert shown == "[] True"  # the hook itself is there


def test_importing_the_package_imports_no_torch() -> None:
    shown = python("""
        import sys
        import odb_factory, odb_factory.config, odb_factory.cli
        print(sorted({"torch", "transformers", "llamafactory", "datasets"} & set(sys.modules)))
    """)
    assert shown == "[]"


@pytest.mark.slow
def test_disabled_leaves_stock_alone() -> None:
    shown = python(
        """
        import sys
        from llamafactory.hparams import parser
        import llamafactory.train.tuner as tuner
        print(parser._TRAIN_ARGS[3].__module__, parser._TRAIN_ARGS[3].__name__, tuner.run_sft.__module__)
        print(sorted(m for m in sys.modules if m.startswith("odb_factory.llamafactory.")))
        """,
        ODB_FACTORY_DISABLE="1",
    )
    lines = shown.splitlines()[-2:]
    assert lines[0] == "llamafactory.hparams.finetuning_args FinetuningArguments llamafactory.train.sft.workflow"
    ours = ("activate", "autoload", "seams")  # which import nothing but the standard library
    assert lines[1] == str([f"odb_factory.llamafactory.{name}" for name in ours])


@pytest.mark.slow
@pytest.mark.parametrize("first", ["arguments", "run"])
def test_our_modules_may_be_imported_first(first: str) -> None:
    """They import LLaMA-Factory, where the installers need them."""
    shown = python(f"""
        import warnings
        warnings.simplefilter("error", RuntimeWarning)
        import odb_factory.llamafactory.{first}
        from odb_factory.llamafactory.arguments import OdbFinetuningArguments
        from llamafactory.hparams import parser
        from odb_factory.llamafactory.seams import registry
        print(OdbFinetuningArguments in parser._TRAIN_ARGS, *registry.installed)
    """)
    assert shown.splitlines()[-1] == "True llamafactory.hparams.parser._TRAIN_ARGS"


@pytest.mark.slow
def test_arguments_are_unpickled_where_nothing_is_imported() -> None:
    """As in a process that starts with `spawn`."""
    from llamafactory.v1.config import get_args

    from odb_factory.llamafactory.arguments import OdbFinetuningArguments

    sent = (OdbFinetuningArguments(odb=True, odb_depth=7), get_args({"batching_strategy": "odb", "odb_depth": 8})[2])
    shown = python(f"""
        import pickle
        v0, v1 = pickle.loads({pickle.dumps(sent)!r})
        print(type(v0).__name__, v0.odb_depth, type(v1).__name__, v1.odb_depth)
    """)
    assert shown.splitlines()[-1] == "OdbFinetuningArguments 7 OdbTrainingArguments 8"


def test_the_start_up_hook_names_the_modules_that_have_one() -> None:
    text = (Path(activate.__file__).parent / "odb_factory_hook.pth").read_text(encoding="utf-8")
    assert set(re.findall(r'"(llamafactory\.[\w.]+)"', text)) == set(activate.INSTALLERS)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["arguments", "trainer"])
def test_our_modules_of_v1_may_be_imported_first(first: str) -> None:
    shown = python(f"""
        import warnings
        warnings.simplefilter("error", RuntimeWarning)
        import odb_factory.llamafactory.v1.{first}
        import llamafactory.v1.trainers.sft_trainer
        from odb_factory.llamafactory.seams import registry
        print(*registry.installed)
    """)
    assert set(shown.splitlines()[-1].split()) == {str(V1_ARGS), str(V1_TRAINER)}


@pytest.mark.slow
def test_disabled_leaves_v1_alone() -> None:
    shown = python(
        """
        from llamafactory.v1.config import arg_parser
        from llamafactory.v1.trainers import sft_trainer
        from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin
        names = (arg_parser.TrainingArguments, sft_trainer.SFTTrainer)
        print(*(c.__module__ for c in names), "odb" in BatchingPlugin._registry)
        """,
        ODB_FACTORY_DISABLE="1",
    )
    v1 = "llamafactory.v1"
    assert shown.splitlines()[-1] == f"{v1}.config.training_args {v1}.trainers.sft_trainer False"


def test_hooked_modules_keep_their_own_loader() -> None:
    """So that tools which read a module's source or spec see what they see without us."""
    import inspect

    for seam in (TRAIN_ARGS, RUN_SFT):
        module = importlib.import_module(seam.module)
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert module.__spec__ is not None
        assert module.__spec__.loader is module.__loader__
        assert "_training_function" in inspect.getsource(module) or "_parse_args" in inspect.getsource(module)
