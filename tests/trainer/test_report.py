"""The lines of the audit, without a run."""

from __future__ import annotations

import json
from pathlib import Path

from odb_factory.core.sample import Dropped
from odb_factory.trainer.report import Audit
from tests.trainer.test_ledger import step


def test_a_line_marks_bad_samples(tmp_path: Path) -> None:
    audit = Audit(tmp_path, rank=0, write_steps=True)
    audit.write(step(0, dropped=(Dropped(3, "overlong"), Dropped(4, "missing image", bad=True))), update=1)
    audit.close()
    (line,) = [json.loads(line) for line in (tmp_path / "odb_audit.rank0.jsonl").read_text().splitlines()]
    assert line["dropped"] == [[3, "overlong", False], [4, "missing image", True]]
    assert line["update"] == 1
