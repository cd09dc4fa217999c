"""What is fetched: through the Hub's own client from a server on this machine, and what is said when it fails."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from odb_factory.tools.data import images as images_module
from odb_factory.tools.data.images import MissingImage, Web
from odb_factory.tools.data.sets import SETS
from tests.tools.data.raw import (
    jpeg,
    lines_of,
    llava_row,
    sharegpt4o_row,
    ultrachat_row,
    write_sharegpt4o,
    write_ultrachat,
)
from tests.tools.data.server import Server, serving

COMMAND = """
import sys
from odb_factory import cli
from odb_factory.tools.data import sets

if sys.argv[1]:
    object.__setattr__(sets.SETS["llava"], "images_url", sys.argv[1])
sys.exit(cli.main(["data", *sys.argv[2:]]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Server]:
    """The Hub, with the three datasets, and with COCO's images below /train2017."""
    folder = tmp_path / "hub"
    parts = write_ultrachat(tmp_path / "raw", [ultrachat_row(n) for n in range(30)])
    for name, part in zip(SETS["ultrachat"].files, sorted((parts / "data").iterdir()), strict=True):
        put(folder / SETS["ultrachat"].repository / name, part.read_bytes())
    rows = [llava_row(n) for n in range(12)]
    put(folder / SETS["llava"].repository / "llava_instruct_150k.json", json.dumps(rows).encode())
    for number, name in enumerate({row["image"] for row in rows}):
        put(folder / "train2017" / name, jpeg(number))
    captions = [sharegpt4o_row(n) for n in range(6)]
    write_sharegpt4o(folder / SETS["sharegpt4o"].repository, [json.dumps(row) for row in captions], ["1.jpg", "2.jpg"])
    with serving(folder) as server:
        yield server


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def environment(tmp_path: Path, endpoint: str) -> dict[str, str]:
    """As of a user with an empty cache and this Hub; no proxy may stand in between."""
    keep = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_OFFLINE"):
        keep.pop(name, None)
    return {**keep, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}


def data(tmp_path: Path, endpoint: str, *arguments: str, images: str = "") -> subprocess.CompletedProcess[str]:
    """`odb-factory data ... --dir data` as a process of its own."""
    command = [sys.executable, "-c", COMMAND, images, *arguments, "--dir", "data"]
    env = environment(tmp_path, endpoint)
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_only_the_files_that_are_needed(hub: Server, tmp_path: Path) -> None:
    done = data(tmp_path, hub.url, "ultrachat", "--limit", "15")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(tmp_path / "data/ultrachat_200k.jsonl")) == 15
    assert sum(method == "GET" and "of-00003" in path for method, path, _ in hub.requests) == 2
    hub.requests.clear()
    done = data(tmp_path, hub.url, "ultrachat")
    assert len(lines_of(tmp_path / "data/ultrachat_200k.jsonl")) == 30, done.stderr
    assert sum(method == "GET" and "of-00003" in path for method, path, _ in hub.requests) == 1


def test_an_interrupted_download_goes_on(hub: Server, tmp_path: Path) -> None:
    name = hub.folder / SETS["llava"].repository / "llava_instruct_150k.json"
    rows = [llava_row(n % 12, padding="x" * 40_000) for n in range(300)]
    put(name, json.dumps(rows).encode())
    hub.stop_after = 11_000_000  # the client writes ten megabytes at a time
    command = [sys.executable, "-c", COMMAND, f"{hub.url}/train2017/", "llava", "--dir", "data"]
    env = environment(tmp_path, hub.url)
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert hub.stopped.wait(30)
        end = time.monotonic() + 30
        while not any(p.stat().st_size for p in (tmp_path / "data").rglob("*.part")):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "data/llava_150k.jsonl").exists()
    (part,) = (tmp_path / "data").rglob("*.part")
    here = part.stat().st_size
    hub.stop_after = None
    hub.release.set()
    hub.requests.clear()
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert done.returncode == 0, done.stderr
    ranges = [span for method, path, span in hub.requests if method == "GET" and path.endswith(".json")]
    assert ranges == [f"bytes={here}-"]  # the rest, not all of it again
    assert len(lines_of(tmp_path / "data/llava_150k.jsonl")) == 300


def test_a_damaged_download_is_noticed(hub: Server, tmp_path: Path) -> None:
    etag = hashlib.sha256((hub.folder / SETS["llava"].repository / "llava_instruct_150k.json").read_bytes()).hexdigest()
    put(tmp_path / f"data/llava_150k_raw/llava_instruct_150k.json.{etag[:16]}.part", b"something else")
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert done.returncode == 2
    assert "llava_instruct_150k.json was damaged in transfer; run again" in done.stderr
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert "12 rows read, 12 written, 0 dropped" in done.stdout


def test_images_from_the_web(hub: Server, tmp_path: Path) -> None:
    hub.status["000000000001.jpg"] = 404
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert done.returncode == 0, done.stderr
    written = lines_of(tmp_path / "data/llava_150k.jsonl")
    assert [one["images"] for one in written[:1]] == [["llava_150k_images/000000000000.jpg"]]
    dropped = lines_of(tmp_path / "data/llava_150k_dropped.jsonl")
    assert [(one["row"], one["reason"]) for one in dropped] == [(n, "image not found") for n in (3, 4, 5)]
    # those that are here are not fetched again
    hub.status.clear()
    hub.requests.clear()
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert "12 rows read, 12 written, 0 dropped" in done.stdout
    assert [path for _, path, _ in hub.requests if "train2017" in path] == ["/train2017/000000000001.jpg"]


def test_an_image_that_was_cut_off_is_fetched_again(hub: Server, tmp_path: Path) -> None:
    whole = (hub.folder / "train2017/000000000001.jpg").read_bytes()
    put(tmp_path / "data/llava_150k_images/000000000001.jpg", whole[:400])
    done = data(tmp_path, hub.url, "llava", images=f"{hub.url}/train2017/")
    assert "12 rows read, 12 written, 0 dropped" in done.stdout, done.stderr
    assert (tmp_path / "data/llava_150k_images/000000000001.jpg").read_bytes() == whole


def test_a_server_that_stops_answering(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module.time, "sleep", lambda _: None)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    images = Web(f"{hub.url}/train2017/", tmp_path / "images", "Point --source at a local copy.")
    hub.status["000000000001.jpg"] = 503
    with pytest.raises(OSError, match=r"could not fetch .*000000000001\.jpg .*503.* Point --source at a local copy\."):
        images.get(["000000000001.jpg"])
    assert len(hub.requests) == 1  # it has never answered: no second attempt
    assert isinstance(images.get(["000000000002.jpg"])["000000000002.jpg"], Path)
    hub.requests.clear()
    with pytest.raises(OSError, match="503"):
        images.get(["000000000001.jpg"])
    assert len(hub.requests) == 3
    hub.status = {"000000000001.jpg": 404}
    assert isinstance(images.get(["000000000001.jpg"])["000000000001.jpg"], MissingImage)


def test_an_image_whose_transfer_breaks_off(hub: Server, tmp_path: Path) -> None:
    hub.stop_after = 100
    hub.release.set()
    images = Web(f"{hub.url}/train2017/", tmp_path / "images", "Point --source at a local copy.")
    with pytest.raises(OSError, match=r"could not fetch .*000000000001\.jpg .* Point --source at a local copy\."):
        images.get(["000000000001.jpg"])
    assert not (tmp_path / "images").exists()


def test_terms_that_were_not_accepted(hub: Server, tmp_path: Path) -> None:
    hub.gated.add("OpenGVLab/ShareGPT-4o")
    done = data(tmp_path, hub.url, "sharegpt4o")
    assert done.returncode == 2
    assert "accept their terms" in done.stderr
    assert "HF_TOKEN" in done.stderr
    hub.gated.clear()
    done = data(tmp_path, hub.url, "sharegpt4o")
    assert "6 rows read, 2 written, 4 dropped" in done.stdout, done.stderr


def test_a_file_that_is_gone(hub: Server, tmp_path: Path) -> None:
    shutil.rmtree(hub.folder / "liuhaotian")
    done = data(tmp_path, hub.url, "llava")
    assert done.returncode == 2
    assert "could not fetch llava_instruct_150k.json of liuhaotian/LLaVA-Instruct-150K: it no longer exists" in (
        done.stderr
    )
    hub.status["llava_instruct_150k.json"] = 500
    done = data(tmp_path, hub.url, "llava")
    assert done.returncode == 2
    assert "the Hugging Face Hub answered with an error (" in done.stderr
    assert "Point --source" in done.stderr


@pytest.mark.parametrize(
    ("kind", "endpoint", "offline", "expected"),
    [
        ("ultrachat", "http://127.0.0.1:9", "0", "the Hugging Face Hub cannot be reached ("),
        ("llava", "http://no-such-host.invalid", "0", "the Hugging Face Hub cannot be reached ("),
        ("sharegpt4o", "http://127.0.0.1:9", "1", "the Hugging Face Hub is switched off (HF_HUB_OFFLINE)"),
    ],
)
def test_without_network(kind: str, endpoint: str, offline: str, expected: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "", kind, "--dir", "data"]
    env = {**environment(tmp_path, endpoint), "HF_HUB_OFFLINE": offline}
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert time.monotonic() - start < 20
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("odb-factory: could not fetch ")
    assert expected in line
    assert line.endswith(f"Point --source at a local copy ({SETS[kind].local}).")
    assert SETS[kind].repository in line


def test_images_out_of_reach(hub: Server, tmp_path: Path) -> None:
    done = data(tmp_path, hub.url, "llava", images="http://127.0.0.1:9/train2017/")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("odb-factory: could not fetch http://127.0.0.1:9/train2017/0000")
    assert "Point --source at a local copy" in last
    assert not (tmp_path / "data/llava_150k.jsonl").exists()
