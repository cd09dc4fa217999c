"""Checks that odb-factory takes effect in LLaMA-Factory: start-up hook, commands on PATH, and seams."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from odb_factory.llamafactory.autoload import DISABLE_VARIABLE
from odb_factory.llamafactory.seams import RUN_SFT, TESTED_VERSIONS, TRAIN_ARGS
from odb_factory.tools.doctor.machine import Machine, ProbeError
from odb_factory.tools.doctor.process import MARK
from odb_factory.tools.doctor.result import Check, fail, ok, warn

HOOK_FILE = "odb_factory_hook.pth"

COMMANDS = ("llamafactory-cli", "torchrun")
"""The commands that start a run; LLaMA-Factory looks for `torchrun` on PATH."""

QUESTION = f"""
import importlib.util, json, os, sys, sysconfig
active = any(getattr(finder, "__name__", "") == "OdbFactoryHook" for finder in sys.meta_path)
spec = importlib.util.find_spec("odb_factory")
site = sys.modules.get("site")
folders = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE) if site else []
hooks = [path for path in (os.path.join(folder, {HOOK_FILE!r}) for folder in folders) if os.path.isfile(path)]
schemes = [sysconfig.get_default_scheme()] + ["posix_user"] * bool(site and site.ENABLE_USER_SITE)
home = os.path.dirname(os.path.dirname(spec.origin)) if spec and spec.origin else None
off = home is not None and __import__("odb_factory.llamafactory.autoload", fromlist=["disabled"]).disabled()
print({MARK!r} + json.dumps(
    {{"active": active, "off": off, "home": home, "folders": folders, "hooks": hooks, "prefix": sys.prefix,
     "scripts": [sysconfig.get_path("scripts", scheme) for scheme in schemes],
     "no_user_site": bool(site) and not site.ENABLE_USER_SITE and sys.flags.no_user_site == 1}}
))
"""
"""Code for a fresh Python: reports whether the hook is active, and where it is or would be installed."""


def check_hook(machine: Machine) -> Iterator[Check]:
    """A fresh Python, as LLaMA-Factory's launcher starts it, runs the start-up hook."""
    seen = machine.ask(QUESTION)
    if seen["off"]:
        value = machine.environ.get(DISABLE_VARIABLE)
        yield fail(
            "hook",
            f"{DISABLE_VARIABLE}={value} switches odb-factory off: LLaMA-Factory does not know `odb:`",
            f"unset {DISABLE_VARIABLE}",
        )
    elif seen["active"]:
        yield ok("hook", f"a fresh Python has it, from {', '.join(seen['hooks']) or 'its site-packages'}")
    else:
        yield fail("hook", *_why_not(machine, seen))


def _why_not(machine: Machine, seen: Mapping[str, Any]) -> tuple[str, str]:
    """Why a fresh Python does not run the hook, and the remedy."""
    reinstall = f"{machine.python} -m pip install --force-reinstall --no-deps odb-factory (or -e and its folder)."
    if not seen["folders"]:
        return (
            f"{machine.python} starts without its site-packages (as with -S), so that no hook is read",
            "Start Python and llamafactory-cli without -S.",
        )
    if seen["hooks"]:
        return f"{seen['hooks'][0]} is there, but a fresh Python did not run it", reinstall
    place = ", ".join(seen["folders"])
    if seen["home"] is None:
        more = " and PYTHONNOUSERSITE keeps the user's packages out" if seen["no_user_site"] else ""
        return f"a fresh {machine.python} does not find odb_factory in {place}{more}", reinstall
    return (
        f"{HOOK_FILE} is missing in {place}: LLaMA-Factory does not know `odb:` (the package itself is found in "
        f"{seen['home']})",
        reinstall,
    )


def check_commands(machine: Machine) -> Iterator[Check]:
    """`llamafactory-cli` and `torchrun` on PATH belong to the environment that odb-factory is installed in."""
    for command in COMMANDS:
        yield _check_command(machine, command)


def _check_command(machine: Machine, command: str) -> Check:
    beside = Path(machine.python).parent
    path = shutil.which(command, path=machine.environ.get("PATH", ""))
    if path is None:
        if (beside / command).exists():
            return warn(
                "commands", f"{command} is not on PATH, but lies in {beside}", f"export PATH={beside}:$PATH (activate)."
            )
        for folder in map(Path, machine.ask(QUESTION)["scripts"]):  # where pip --user installs it
            if (folder / command).exists():
                found = f"{command} is not on PATH, but lies in {folder}"
                return warn("commands", found, f"export PATH={folder}:$PATH.")
        return fail(
            "commands",
            f"there is no {command} on PATH or in {beside}",
            f"{machine.python} -m pip install llamafactory.",
        )
    if Path(path).parent.resolve() == beside.resolve():
        return ok("commands", path)
    python = interpreter(Path(path))
    if python is None:
        return warn(
            "commands",
            f"{path} lies in another folder than {machine.python}, and does not say which Python runs it",
            f"Put {beside} first on PATH, so that the environment that was checked here runs the training.",
        )
    try:
        theirs = machine.ask(QUESTION, python)
    except ProbeError as error:
        return fail("commands", f"{path} is run by {python}: {error}", f"Put {beside} first on PATH.")
    if theirs["prefix"] == machine.ask(QUESTION)["prefix"]:
        return ok("commands", path)
    if theirs["active"]:
        return warn(
            "commands",
            f"{path} belongs to another environment ({theirs['prefix']}), which has odb-factory, too",
            f"Check that one: {python} -m odb_factory.cli doctor; or put {beside} first on PATH.",
        )
    return fail(
        "commands",
        f"{path} belongs to another environment ({theirs['prefix']}), which does not have odb-factory",
        f"Put {beside} first on PATH, or {python} -m pip install odb-factory.",
    )


def interpreter(script: Path) -> str | None:
    """The Python interpreter named in a script's first lines; None if there is none."""
    with script.open("rb") as file:
        head = file.read(1024).decode("utf-8", "replace")
    if not head.startswith("#!"):
        return None
    # if the path is long or contains spaces, pip writes `#!/bin/sh` and an exec of the quoted path
    match = re.match(
        r"#!\s*(/\S*python[\d.]*)\s*$|#!/bin/sh\n'''exec' \"?(/[^\"\n]*?python[\d.]*)\"? ", head, re.MULTILINE
    )
    return next(filter(None, match.groups())) if match else None


REINSTALL = f'pip install --force-reinstall --no-deps "llamafactory=={TESTED_VERSIONS[-1]}"'


def check_seams(machine: Machine) -> Iterator[Check]:
    """LLaMA-Factory's version, each seam, and whether `odb` is a recipe field."""
    seen = machine.probe("seams")
    if seen["version"]:
        yield fail("seams", seen["version"], REINSTALL)
    for seam, problem in seen["seams"].items():
        if problem:
            yield fail("seams", problem if seam in problem else f"{seam}: {problem}", REINSTALL)
        else:
            when = "replaced" if seam in seen["installed"] else "fits"
            yield ok("seams", f"{seam} {when}")
    missing = [str(seam) for seam in (TRAIN_ARGS, RUN_SFT) if str(seam) not in seen["installed"]]
    if seen["known"] and not missing:
        yield ok("seams", f"`odb:` is a recipe field of LLaMA-Factory {importlib.metadata.version('llamafactory')}")
    else:
        said = f" ({seen['warnings'][0]})" if seen["warnings"] else ""
        what = (
            "is not a recipe field" if not seen["known"] else f"would have no effect, {', '.join(missing)} is untouched"
        )
        yield fail("seams", f"`odb:` {what}{said}", "See the checks `hook`, `versions` and the seams above.")
