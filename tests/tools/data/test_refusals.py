"""Sources that are not what they should be: nothing of the user's is lost, no row is lost silently, and it is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main
from odb_factory.tools.data import run as run_module
from tests.tools.data.raw import (
    jpeg,
    lines_of,
    llava_row,
    sharegpt4o_row,
    ultrachat_row,
    write_llava,
    write_sharegpt4o,
    write_ultrachat,
)

NAME = "ultrachat_200k"

Command = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`odb-factory data ...` in a folder of its own, with small chunks; returns all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "CHUNK", 4)

    def run(*arguments: Any, status: int = 0) -> str:
        code = main(["data", *map(str, arguments)])
        printed = capsys.readouterr()
        assert code == status, printed.err
        assert "Traceback" not in printed.err
        return printed.out + printed.err

    return run


def raw_lines(path: Path, count: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(ultrachat_row(n)) + "\n" for n in range(count)), encoding="utf-8")
    return path


def dropped(name: str) -> dict[int, str]:
    return {one["row"]: one["reason"] for one in lines_of(Path(f"data/{name}_dropped.jsonl"))}


# -- what is the user's own


@pytest.mark.parametrize("link", [False, True])
def test_the_source_is_not_overwritten(command: Command, link: bool) -> None:
    written = Path(f"data/{NAME}.jsonl")
    source = raw_lines(Path("mine.jsonl") if link else written)
    if link:
        written.parent.mkdir()
        written.symlink_to(source.resolve())
    before = source.read_bytes()
    error = command("ultrachat", "--source", source, status=2)
    assert f"--source {source} is a file that this command writes; give another --dir." in error
    assert source.read_bytes() == before


def test_the_source_is_not_overwritten_beside_a_report(command: Command) -> None:
    """The converted file that this command made is no source either."""
    command("ultrachat", "--source", raw_lines(Path("mine.jsonl")))
    before = Path(f"data/{NAME}.jsonl").read_bytes()
    error = command("ultrachat", "--source", f"data/{NAME}.jsonl", status=2)
    assert "is a file that this command writes" in error
    assert Path(f"data/{NAME}.jsonl").read_bytes() == before


def test_a_file_from_elsewhere_is_not_overwritten(command: Command) -> None:
    mine = Path(f"data/{NAME}.jsonl")
    mine.parent.mkdir()
    mine.write_text("mine\n")
    error = command("ultrachat", "--source", raw_lines(Path("raw.jsonl")), status=2)
    assert f"data/{NAME}.jsonl already exists, and no {NAME}_report.json says that this command made it" in error
    assert mine.read_text() == "mine\n"
    mine.rename("data/other.jsonl")
    command("ultrachat", "--source", "raw.jsonl")
    assert len(lines_of(mine)) == 3


def test_data_between_two_reports_are_ours(command: Command) -> None:
    """As a run that was killed just before its report leaves them, also after a run that could use nothing."""
    command("ultrachat", "--source", raw_lines(Path("raw.jsonl")))
    Path(f"data/{NAME}_report.json").unlink()
    state = {"identity": {}, "rows": 3, "written": 3, "dropped": {}, "data_bytes": 1, "dropped_bytes": 0}
    Path(f"data/{NAME}_state.json").write_text(json.dumps(state))
    Path("bad.jsonl").write_text('{"messages": []}\n')
    assert "none of the 1 rows can be used" in command("ultrachat", "--source", "bad.jsonl", status=2)
    command("ultrachat", "--source", raw_lines(Path("other.jsonl"), 5))
    assert len(lines_of(Path(f"data/{NAME}.jsonl"))) == 5
    assert not Path(f"data/{NAME}_state.json").exists()


# -- rows


@pytest.mark.parametrize("second", ["[3, 4]", "GARBAGE", "\n\n" + " " * 100 + "[3, 4]"])
def test_what_follows_a_list_is_noticed(command: Command, second: str) -> None:
    rows = [llava_row(n) for n in range(3)]
    source = write_llava(Path("raw"), rows, {row["image"] for row in rows})
    path = source / "llava_instruct_150k.json"
    path.write_text(path.read_text() + second)
    error = command("llava", "--source", source, status=2)
    assert "continues after the end of its list (row 3), as if several files had been joined" in error
    assert not Path("data/llava_150k.jsonl").exists()


def test_two_files_of_rows_are_ambiguous(command: Command) -> None:
    rows = [llava_row(n) for n in range(3)]
    write_llava(Path("raw/a"), rows[:1], {row["image"] for row in rows})
    write_llava(Path("raw/b"), rows, {row["image"] for row in rows})
    error = command("llava", "--source", "raw", status=2)
    assert "has 2 files llava_instruct_150k.json (a/llava" in error
    assert "give one of them." in error
    assert not Path("data").exists()
    assert "3 rows read, 3 written" in command("llava", "--source", "raw/b")


def test_parquet_without_the_id(command: Command) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    bad = ultrachat_row(2, messages=[])
    table = pyarrow.Table.from_pylist([{"messages": row["messages"]} for row in (*map(ultrachat_row, range(2)), bad)])
    write_table(table, "mine.parquet")
    assert "3 rows read, 2 written, 1 dropped" in command("ultrachat", "--source", "mine.parquet")
    assert dropped(NAME) == {2: "no messages"}


def test_damaged_parquet(command: Command) -> None:
    folder = write_ultrachat(Path("raw"), [ultrachat_row(n) for n in range(50)], shards=1)
    (path,) = (folder / "data").iterdir()
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[-8 - length : -8] = b"\xff" * length
    path.write_bytes(content)
    error = command("ultrachat", "--source", folder, status=2)
    assert f"{path} is not a readable Parquet file (" in error
    assert error.rstrip().endswith("); download it again.")


def test_a_line_nested_too_deeply(command: Command) -> None:
    source = raw_lines(Path("raw.jsonl"))
    with source.open("a") as file:
        file.write("[" * 200_000 + "\n" + json.dumps(ultrachat_row(4)) + "\n")
    assert "5 rows read, 4 written, 1 dropped" in command("ultrachat", "--source", source)
    assert dropped(NAME) == {3: "line that is nested too deeply"}


def test_a_list_nested_too_deeply(command: Command) -> None:
    Path("list.json").write_text("[1, " + "[" * 200_000)
    assert "list.json is nested too deeply after row 1" in command("ultrachat", "--source", "list.json", status=2)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_other_encodings_are_refused(command: Command, encoding: str, suffix: str) -> None:
    path = raw_lines(Path("raw.jsonl")).rename(f"raw{suffix}")
    path.write_bytes(path.read_text(encoding="utf-8").encode(encoding))
    error = command("ultrachat", "--source", path, status=2)
    assert f"raw{suffix} is not UTF-8 but UTF-16 or UTF-32; convert it" in error


def test_utf8_with_a_mark(command: Command) -> None:
    path = raw_lines(Path("raw.jsonl"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "3 rows read, 3 written, 0 dropped" in command("ultrachat", "--source", path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 400 + ".jpg", "image not found"),
        ("a\0.jpg", "image name that no file can have"),
        ("\ud800.jpg", "image name that no file can have"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_image_names_that_no_file_has(command: Command, name: str, reason: str, zipped: bool) -> None:
    rows = [sharegpt4o_row(n) for n in range(4)]
    rows[2]["image"] = name
    source = write_sharegpt4o(Path("raw"), list(map(json.dumps, rows)), ["0.jpg", "1.jpg", "3.jpg"])
    if not zipped:
        with zipfile.ZipFile(source / "images.zip") as archive:
            archive.extractall(source)
        (source / "images.zip").unlink()
    assert "4 rows read, 3 written, 1 dropped" in command("sharegpt4o", "--source", source)
    assert dropped("sharegpt4o_57k") == {2: reason}


# -- refusals leave nothing


def test_refusals_leave_nothing(command: Command) -> None:
    Path("rows.txt").write_text("{}")
    assert "--source nope is not there" in command("ultrachat", "--source", "nope", status=2)
    error = command("ultrachat", "--source", "rows.txt", status=2)
    assert "--source rows.txt is none of .parquet, .json, .jsonl; give a folder" in error
    assert not Path("data").exists()
    # an error before the first row is done
    Path("rows.json").write_text("[GARBAGE")
    assert "rows.json is not valid JSON after row 0" in command("ultrachat", "--source", "rows.json", status=2)
    assert [path.name for path in Path("data").iterdir()] == [f".{NAME}.lock"]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_file_where_the_folder_should_be(command: Command, folder: str) -> None:
    Path("file").touch()
    error = command("ultrachat", "--source", raw_lines(Path("raw.jsonl")), "--dir", folder, status=2)
    assert f"--dir {folder} is a file or lies below one; give a folder." in error


def test_a_full_disk(tmp_path: Path) -> None:
    """A disk of 256 KB; what was done before it was full stays."""
    source = raw_lines(tmp_path / "raw.jsonl", 3000)
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=256k none "$0" && "$@"; code=$?; ls "$0"; exit $code'
    start = ["unshare", "-rm", "sh", "-c", script]
    if subprocess.run([*start, str(disk), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount namespace")
    command = [sys.executable, "-m", "odb_factory.cli", "data", "ultrachat", "--source", str(source)]
    done = subprocess.run(
        [*start, str(disk), *command, "--dir", str(disk)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"there is no room left for {disk} (No space left on device); make room, and run the same command again" in (
        done.stderr
    )
    assert "it continues where this one stopped" in done.stderr
    assert f"{NAME}_state.json" in done.stdout.split()
    assert f"{NAME}.jsonl" not in done.stdout.split()


def test_a_file_that_may_not_grow_and_then_may(tmp_path: Path) -> None:
    source = raw_lines(tmp_path / "raw.jsonl", 1500)
    command = [sys.executable, "-m", "odb_factory.cli", "data", "ultrachat", "--source", str(source), "--dir"]
    limited = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh"]
    stopped = subprocess.run(
        [*limited, *command, str(tmp_path / "a")], capture_output=True, text=True, timeout=60, check=False
    )
    assert stopped.returncode == 2, stopped.stderr
    assert "File too large; fix that, and run the same command again: it continues where" in stopped.stderr
    assert json.loads((tmp_path / "a" / f"{NAME}_state.json").read_text())["rows"] >= 256
    for name in "ab":
        subprocess.run([*command, str(tmp_path / name)], capture_output=True, timeout=60, check=True)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix != ".lock"}
        for name in "ab"
    ]
    assert files[0] == files[1]
    assert f"{NAME}_state.json" not in files[0]


# -- images


def test_the_first_images_may_be_missing(command: Command) -> None:
    rows = [llava_row(n) for n in range(30)]
    source = write_llava(Path("raw"), rows, {row["image"] for row in rows[12:]})
    assert "30 rows read, 18 written, 12 dropped" in command("llava", "--source", source)
    assert set(dropped("llava_150k")) == set(range(12))


def test_the_first_images_may_be_missing_in_an_archive(command: Command) -> None:
    rows = [sharegpt4o_row(n) for n in range(12)]
    source = write_sharegpt4o(Path("raw"), list(map(json.dumps, rows)), ["10.jpg", "11.jpg"])
    assert "12 rows read, 2 written, 10 dropped" in command("sharegpt4o", "--source", source)


def test_a_folder_of_other_images_does_not_hide_an_archive(command: Command) -> None:
    rows = [llava_row(n) for n in range(12)]
    source = write_llava(Path("raw"), rows, {row["image"] for row in rows})
    folder = source / "train2017"
    with zipfile.ZipFile(source / "train2017.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"train2017/{path.name}")
    cut = folder / "000000000001.jpg"
    cut.write_bytes(cut.read_bytes()[:400])
    (folder / "000000000002.jpg").unlink()
    (source / "images").mkdir()
    (source / "images" / "holiday.jpg").write_bytes(jpeg(1))
    assert "12 rows read, 12 written, 0 dropped" in command("llava", "--source", source)
    places = {Path(one["images"][0]).name: Path(one["images"][0]) for one in lines_of(Path("data/llava_150k.jsonl"))}
    assert places["000000000000.jpg"].parent == folder.resolve()
    assert [str(places[f"00000000000{n}.jpg"].parent) for n in (1, 2)] == ["llava_150k_images"] * 2


def test_a_broken_archive_beside_a_whole_folder_does_not_matter(command: Command) -> None:
    rows = [llava_row(n) for n in range(6)]
    source = write_llava(Path("raw"), rows, {row["image"] for row in rows})
    (source / "train2017.zip").write_bytes(b"PK\3\4 cut off")
    assert "6 written" in command("llava", "--source", source)
    (source / "train2017" / rows[0]["image"]).unlink()
    os.utime(source / "llava_instruct_150k.json", (1, 1))
    error = command("llava", "--source", source, status=2)
    assert "train2017.zip is not a whole zip file; download it again, or move it away." in error


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_in_a_compressed_archive(command: Command, kind: int) -> None:
    rows = [sharegpt4o_row(n) for n in range(5)]
    source = write_sharegpt4o(Path("raw"), list(map(json.dumps, rows)), [])
    with zipfile.ZipFile(source / "images.zip", "w", kind) as archive:
        for n in range(5):
            archive.writestr(f"{n}.jpg", jpeg(n))
        member = archive.getinfo("2.jpg")
    content = bytearray((source / "images.zip").read_bytes())
    start = member.header_offset + 30 + len(member.filename)
    content[start : start + member.compress_size] = b"\xff" * member.compress_size
    (source / "images.zip").write_bytes(content)
    assert "5 rows read, 4 written, 1 dropped" in command("sharegpt4o", "--source", source)
    assert dropped("sharegpt4o_57k") == {2: "image that is damaged in the archive"}


def test_an_image_that_was_cut_off_is_taken_out_again(command: Command) -> None:
    rows = [sharegpt4o_row(n) for n in range(4)]
    source = write_sharegpt4o(Path("raw"), list(map(json.dumps, rows)), [row["image"] for row in rows])
    cut = Path("data/sharegpt4o_57k_images/1.jpg")
    cut.parent.mkdir(parents=True)
    cut.write_bytes(jpeg(1)[:400])
    assert "4 rows read, 4 written, 0 dropped" in command("sharegpt4o", "--source", source)
    assert cut.read_bytes() == jpeg(1)


# -- what is shown


def test_the_bar_ends_at_what_was_there(command: Command) -> None:
    printed = command("ultrachat", "--source", raw_lines(Path("raw.jsonl"), 10))
    assert "10/10 " in printed
    assert "207865" not in printed
    folder = write_ultrachat(Path("raw"), [ultrachat_row(n) for n in range(20)])
    printed = command("ultrachat", "--source", folder)
    assert "20%" in printed  # 4 of 20, known from the start
    assert "20/20 " in printed
    assert "10/10 " in command("ultrachat", "--source", "raw.jsonl", "--limit", 4000)


def test_the_next_command_is_quoted(command: Command) -> None:
    printed = command("ultrachat", "--source", raw_lines(Path("raw.jsonl")), "--dir", "s/a b")
    assert "dataset_dir='s/a b'" in printed
