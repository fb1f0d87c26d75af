"""The optimizer's table can be made without a GPU, and its errors are true."""

import pytest

from hymo.bench import optimizer as bench
from hymo.optim.normuon import NorMuon


def test_the_table_has_a_row_for_each_contestant(capsys):
    assert bench.main(["--sets", "bench", "--repeats", "1", "--only", "hymo", "torch"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [cells[0].removeprefix("| ") for cells in rows]
    assert names[1:] == [
        "hymo NorMuon",
        "hymo Muon (torch's form)",
        "hymo CautiousAdamW",
        "torch AdamW fused",
        "torch Muon",
    ]
    assert all(float(cells[1]) > 0 for cells in rows[1:])


def test_a_contestant_that_is_not_installed_is_named_with_its_reason(capsys):
    assert bench.main(["--sets", "bench", "--repeats", "1", "--only", "dion"]) == 0
    assert "| dion NorMuon | ModuleNotFoundError: No module named 'dion'" in capsys.readouterr().out


def test_the_error_is_that_of_the_polynomial():
    exact = bench.update_error(lambda p: NorMuon(p, orthogonalize="exact"), "row", [(40, 24), (24, 40)], "cpu")
    assert exact < 1e-5
    five = bench.update_error(lambda p: NorMuon(p, preset="torch"), "polar", [(40, 24)], "cpu")
    assert five == pytest.approx(0.17, abs=0.06)
