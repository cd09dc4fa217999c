"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# torch's stores look up the names of the addresses that connect; a name server that does not answer must not cost 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# processes that tests start (a fork server, subprocesses) must find the package and the tests from any folder
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
