"""`odb-factory doctor` as a whole, on a machine where training works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid

import pytest

from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.registry import CHECKS, PROBES, run_checks
from odb_factory.tools.doctor.result import Check, Status
from tests.llamafactory.cli import MARK, marked, wait_for_end
from tests.tools.doctor.helpers import DEADLINE, SCRIPTS, clean, doctor


@pytest.mark.slow
@pytest.mark.distributed
def test_a_healthy_machine_is_green() -> None:
    done = subprocess.run(
        [str(SCRIPTS / "odb-factory"), "doctor"],
        env=clean(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last.startswith("Nothing found that would break training: ")
    assert last.endswith(" 0 FAIL.")
    seen = [line.split()[1] for line in lines if re.match(r"OK|WARN", line)]
    assert list(dict.fromkeys(seen)) == list(CHECKS)
    text = done.stdout
    assert "OK    seams          `odb:` is a recipe field of LLaMA-Factory 0.9.5" in text
    assert re.search(r"OK    gloo +two local processes met at \S+ in \d\.\d s, an exchange takes \d+\.\d\d ms", text)
    assert re.search(r"OK    loader +two ranks .* emitted 64 samples once each, in \d+ aligned steps", text)
    assert re.search(r"OK    hook +a fresh Python has it, from .*odb_factory_hook\.pth", text)
    assert re.search(r"OK    versions +torch 2\.\S+ \(", text)


def test_json_and_one_check() -> None:
    report = doctor("python", "versions")
    assert report.code == 0
    assert {check["name"] for check in report.checks} == {"python", "versions"}
    names = {check["found"].split()[0] for check in report.of("versions", "OK")}
    assert names >= {
        *("torch", "llamafactory", "transformers", "datasets", "accelerate", "deepspeed", "qwen-vl-utils", "tokenizers")
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "goo"], "odb-factory: there is no check 'goo'; --only takes one of python, versions,"),
        (["--odb-port", "70000"], "odb-factory: --odb-port must be from 0 to 65535, got 70000."),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "odb_factory.cli", "doctor", *arguments],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_the_list_has_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    from odb_factory.cli import main

    assert main(["doctor", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CHECKS)
    assert all(len(line.split()) > 3 for line in lines)
    assert set(PROBES) <= set(CHECKS)


def test_it_starts_without_heavy_libraries() -> None:
    code = "import sys, odb_factory.tools.doctor.registry, odb_factory.tools.doctor.command; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean(), capture_output=True, text=True, timeout=60, check=True
    )
    assert "odb_factory.tools.doctor.registry" in done.stdout.split()
    assert not {"torch", "llamafactory", "transformers", "datasets", "numpy"} & set(done.stdout.split())


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine) -> None:
        raise KeyError("something nobody\nthought of")

    monkeypatch.setitem(CHECKS, "files", broken)  # type: ignore[arg-type]
    with Machine(environ=clean()) as machine:
        checks = list(run_checks(machine, ["shared_memory", "files", "variables"]))
    assert {check.name for check in checks} == {"shared_memory", "files", "variables"}
    [bad] = [check for check in checks if check.status is Status.FAIL]
    assert bad.name == "files"
    assert bad.found.startswith("could not be checked: KeyError: ")
    assert "--only files" in bad.remedy


def test_a_line_has_a_remedy_exactly_where_something_is_wrong() -> None:
    with pytest.raises(ValueError, match="check files"):
        Check("files", Status.FAIL, "too few")
    with pytest.raises(ValueError, match="check files"):
        Check("files", Status.OK, "enough", "do this")


@pytest.mark.distributed
def test_ctrl_c_leaves_nothing_behind() -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "odb_factory.cli", "doctor", "--only", "seams", "--only", "loader"],
        env=clean(**{MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        end = time.monotonic() + 30
        while len(list(marked(mark))) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(list(marked(mark))) >= 3, "both probes are running"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.splitlines()[-1] == "odb-factory: interrupted."
        assert "Traceback" not in said
        assert wait_for_end(mark) == []
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
