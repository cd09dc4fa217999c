"""The tiny model, its data, and settings, are those of the tests of the glue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.conftest import demo, one_thread
from tests.llamafactory.helpers import RECIPE
from tests.tools.plan.helpers import Write

__all__ = ["demo", "one_thread"]


@pytest.fixture
def write(demo: DemoPaths, tmp_path: Path) -> Write:
    """Writes a recipe over the demo, with changed fields, and gives its path."""

    def write(**fields: Any) -> Path:
        recipe = {
            **RECIPE,
            "model_name_or_path": str(demo.model),
            "dataset_dir": str(demo.data),
            "output_dir": str(tmp_path / "out"),
            "cutoff_len": 1024,
            "per_device_train_batch_size": 2,
            "odb": True,
            "odb_token_budget": 1280,
            "odb_depth": 16,
            **fields,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return write
