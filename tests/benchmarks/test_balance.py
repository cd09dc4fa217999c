"""`balance`: its figures by hand on tiny epochs, its sizes, and one quick run as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.balance import sources, view
from benchmarks.balance.figures import epoch_figures, order_figures
from benchmarks.balance.run import SQUARES
from benchmarks.batchers import public_is_installed
from benchmarks.epochs import Epoch, Micro, StepTime
from benchmarks.rows import read_rows


def test_figures_of_an_epoch_by_hand() -> None:
    a, b, filler = Micro((0, 1), 20, 200), Micro((2,), 8, 64), Micro((), 4, 16)
    epoch = Epoch(((a, b), (Micro((0,), 10, 100), filler)), (10, 6, 8, 9))
    figures = epoch_figures(epoch, 16, StepTime())
    assert figures["padding"] == pytest.approx(1 - (10 + 6 + 8 + 10) / 38)
    assert figures["balance"] == pytest.approx(38 / (2 * 30))
    assert figures["ideal_share"] == pytest.approx(24 / (2 * 30)), "sample 0 is useful once"
    assert (figures["steps"], figures["fillers"], figures["samples_per_step"]) == (2, 1, 2)
    assert (figures["repeated"], figures["missing"]) == (1, 1)
    assert figures["largest_of_budget"] == pytest.approx(20 / 16)
    slow = epoch_figures(epoch, 16, StepTime(constant=10, per_square=0.1))
    assert slow["ideal_share"] == pytest.approx((24 + 0.1 * 200) / (2 * (30 + 20 + 30)))


def _one_by_one(lengths: list[int]) -> Epoch:
    return Epoch(tuple((Micro((i,), n, n * n),) for i, n in enumerate(lengths)), tuple(lengths))


def test_long_samples_that_sink_to_the_end_are_seen() -> None:
    rising = order_figures(_one_by_one(list(range(1, 101))))
    assert rising["order_correlation"] == pytest.approx(1.0)
    assert rising["part_last"] == rising["part_most"] == pytest.approx(95.5 / 50.5)
    assert rising["part_least"] == pytest.approx(5.5 / 50.5)
    level = order_figures(_one_by_one([5] * 40))
    assert (level["order_correlation"], level["part_least"], level["part_most"]) == (0.0, 1.0, 1.0)


def test_an_epoch_has_the_size_of_the_data_set_where_that_is_many_windows() -> None:
    ultrachat = sources.profile("ultrachat")
    assert ultrachat.size_for(8, 1024) == min(200_000, 24 * 8 * 1024)
    assert ultrachat.size_for(2, 256) == 24 * 2 * 256
    assert ultrachat.size_for(64, 1024) == 12 * 64 * 1024
    assert sources.fixed("mine", [7, 8, 9], 16, 64).size_for(64, 1024) == 3, "none are invented"


def test_a_file_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Budget and cutoff follow from the lengths; a table of one method renders."""
    file, out = tmp_path / "mine.txt", tmp_path / "rows.jsonl"
    file.write_text("".join(f"{10 + i % 7}\n" for i in range(400)))
    options = ["--lengths", str(file), "--world", "2", "--depth", "16", "--epochs", "2", "--methods", "odb"]
    options += ["--square", "0"]
    assert main(["balance", "--json", str(out), *options]) == 0
    rows = read_rows([out])
    assert [(row.data, row.budget, row.seed) for row in rows] == [("mine", 103, 0), ("mine", 103, 1)]
    assert "| ODB |" in capsys.readouterr().out
    view.plot(rows)
    assert main(["balance", "--json", str(out), "--world", "0"]) == 2
    assert "--world must be at least 1" in capsys.readouterr().err


def test_with_attention_ours_is_there_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default attention takes no time, and then some, at the largest depth."""
    out = tmp_path / "rows.jsonl"
    options = ["--profile", "sharegpt4o", "--size", "1500", "--world", "2", "--depth", "16", "32", "--epochs", "1"]
    options += ["--methods", "packing", "odb", "--attention-length", "5000"]
    assert main(["balance", "--json", str(out), *options]) == 0
    rows = read_rows([out])
    plain, half, whole = [[row for row in rows if row.settings["square"] == s] for s in (0.0, *SQUARES)]
    assert [(row.method, row.depth) for row in plain] == [("packing", None), ("odb", 16), ("odb", 32)]
    assert [(row.method, row.depth) for row in half] == [("odb", 32), ("odb padded", 32)]
    assert [row.settings["attention_length"] for row in whole] == [5000, None]
    assert "| ODB, by padded tokens alone |" in capsys.readouterr().out
    view.plot(rows)

    assert main(["balance", "--json", str(out), *options, "--square", "0.0002"]) == 0
    shares = {row.method: row.figures["ideal_share"] for row in read_rows([out]) if row.depth == 32}
    assert shares["odb"] > shares["odb padded"] + 0.01
    assert main(["balance", "--json", str(out), *options, "--methods", "standard"]) == 0, "none of ours"
    assert "| Standard |" in capsys.readouterr().out
    assert main(["balance", "--json", str(out), "--square", "-1"]) == 2
    assert "--square must be at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["balance", "--quick", "--json", str(out)]) == 0
    rows = read_rows([out])
    assert {row.data for row in rows} == {"ultrachat", "llava", "sharegpt4o", "mm_mix"}
    methods = {"standard", "sorted", "packing", "gmt", "bmt", "paper", "odb", "odb static"}
    assert {row.method for row in rows} == methods | ({"public"} if public_is_installed() else set())
    share = {(r.data, r.ranks, r.method, r.settings.get("batch_size")): r.figures["ideal_share"] for r in rows}
    assert all(0 < value <= 1 for value in share.values())
    for row in rows:
        assert row.figures["missing"] == 0
        if row.method == "odb":
            assert row.figures["deferral"] <= row.figures["deferral_bound"]
            assert row.figures["largest_of_budget"] <= 1
            assert row.figures["repeated"] == 0
            assert (
                row.figures["ideal_share"] > share[row.data, row.ranks, "public", None] if public_is_installed() else 1
            )
    text = view.tables(rows)
    for words in ("### llava", "the paper's protocol", "Standard, batch 1", "against ranks and depth"):
        assert words in text
    view.plot(rows)
