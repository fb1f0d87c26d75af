"""The recurrence benchmark: it checks what it times, counts the bytes, and reports a provider that fails."""

import pytest
import torch

from hymo.bench import recurrence as bench
from hymo.errors import HyMoError

CASE = bench.Case(1, 32, 2, 4, 4, torch.float32, "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda function, device, seconds=1.0: (function(), 2.0)[1])


def test_rows_carry_the_error_beside_the_time():
    rows = {row.provider: row for row in bench.run_case(CASE)}
    assert set(rows) == {"loop", "chunked"}
    for row in rows.values():
        assert row.error < 1e-6
        assert row.gradient_error < 1e-5
        assert row.forward_ms == row.both_ms == 2.0


def test_a_wrong_provider_shows_and_a_failing_one_is_reported(monkeypatch):
    wrong = {"half": lambda v, b, c, g, A_log: bench.gated_recurrence(v, b, c, g / 2, A_log), "none": lambda *xs: 1 / 0}
    monkeypatch.setattr(bench, "providers", lambda case: wrong)
    half, none = bench.run_case(CASE)
    assert half.error > 0.01
    assert none.failure == "ZeroDivisionError: division by zero"
    text = bench.table(CASE, [half, none], bandwidth=1e9)
    assert "ZeroDivisionError" in text.splitlines()[3]


def test_bytes_are_the_least_that_must_move():
    case = bench.Case(4, 4096, 40, 32, 32, torch.bfloat16, "cuda")
    assert case.bytes_forward() == 4 * 4096 * 40 * (4 * 32 * 2 + 4)
    assert case.bytes_both() - case.bytes_forward() == 4 * 4096 * 40 * (7 * 32 * 2 + 8)


def test_the_command_prints_both_tables(capsys):
    assert bench.main(["--shape", "1,16,1,4,4", "1,20,1,4,4", "--providers", "chunked"]) == 0
    out = capsys.readouterr().out
    assert out.count("any decay") == out.count("log-decay <= 5 a step") == 2
    assert "loop" not in out


def test_tuning_tries_launches_and_puts_the_shipped_ones_back(monkeypatch):
    triton_op = pytest.importorskip("hymo.kernels.triton_op")
    shipped, seen = dict(triton_op.LAUNCHES), []
    monkeypatch.setattr(bench, "providers", lambda case: {"triton": None})
    monkeypatch.setattr(
        bench, "run_one", lambda name, op, case: seen.append(dict(triton_op.LAUNCHES)) or bench.Row(name)
    )
    assert len(bench.tune(CASE)) == 28
    assert shipped == triton_op.LAUNCHES
    assert sum(launches != shipped for launches in seen) >= 24


def test_providers_and_shapes_that_are_not_there_are_named(capsys):
    with pytest.raises(HyMoError, match="--providers: found nonsense; accepted here: loop, chunked"):
        bench.main(["--shape", "1,16,1,4,4", "--device", "cpu", "--providers", "chunked,nonsense"])
    for shape in ("1,16", "1,16,1,4,0", "a,b,c,d,e"):
        with pytest.raises(SystemExit):
            bench.main(["--shape", shape])
        assert "five positive numbers B,T,H,D,S" in capsys.readouterr().err
