"""Runs dealt over GPUs: never too many, never past the limit, and a run that fails is a row like the others."""

import argparse
import importlib
import sys
import time
from pathlib import Path

import pytest

from hymo.config_io import load_config
from hymo.plan import parameter_counts

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """script(name) -> that benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def arguments(out, gpus="0", limit=60.0):
    return argparse.Namespace(out=out, gpus=gpus, limit=limit)


def python(text):
    return lambda job: [sys.executable, "-c", text, job.name]


def test_devices_budget_and_number_are_kept(script, tmp_path, monkeypatch):
    """What ran together is read from the times that the runs themselves wrote."""
    variants = script("variants")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = (
        "import os, sys, time\n"
        "began = time.time(); time.sleep(0.5)\n"
        f"with open('{tmp_path}/' + sys.argv[1] + '.ran', 'w') as file:\n"
        "    print(os.environ['CUDA_VISIBLE_DEVICES'], began, time.time(), file=file)\n"
    )
    jobs = [variants.Job(f"j{i}", n_bytes=n) for i, n in enumerate((6, 5, 4, 4, 1, 1, 99))]
    ends = list(variants.deal(jobs, python(text), arguments(tmp_path, "0,1"), at_once=3, budget=10))
    assert sorted(done.job.name for done in ends) == [job.name for job in jobs]
    assert all(done.state == "done" for done in ends)
    times = {}
    for job in jobs:
        device, began, ended = (tmp_path / f"{job.name}.ran").read_text().split()
        times[job.name] = (device, float(began), float(ended), job.n_bytes)
    assert {device for device, *_ in times.values()} == {"0", "1"}
    for device, began, *_ in times.values():
        together = [n for d, b, e, n in times.values() if d == device and b <= began < e]
        assert len(together) <= 3
        assert sum(together) <= 10 or together == [99]
    assert any(b < began < e for _, began, *_ in times.values() for _, b, e, _ in times.values())


def test_numbers_count_among_the_visible_gpus(script, monkeypatch):
    variants = script("variants")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert variants.visible_gpus("1, 0") == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert variants.visible_gpus("0,1") == ["3", "GPU-5a"]
    for shown, numbers in (("3,GPU-5a", "0,2"), ("", "0"), ("3", "-1"), ("3", "x"), ("3", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(SystemExit, match="--gpus: found"):
            variants.visible_gpus(numbers)


def test_a_run_past_its_limit_is_stopped_with_its_children_and_a_failure_is_named(script, tmp_path):
    variants = script("variants")
    child = f"import time; time.sleep(4); open('{tmp_path}/alive', 'w')"
    text = (
        "import subprocess, sys, time\n"
        f"if sys.argv[1] == 'slow': subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)\n"
        "raise SystemExit('no such file')"
    )
    began = time.perf_counter()
    jobs = [variants.Job("slow"), variants.Job("bad")]
    states = {d.job.name: d.state for d in variants.deal(jobs, python(text), arguments(tmp_path, "0,1", limit=1.5))}
    assert states["slow"].startswith("stopped after")
    assert states["bad"] == "failed (1): no such file"
    time.sleep(max(0.0, 4.5 - (time.perf_counter() - began)))
    assert not (tmp_path / "alive").exists()


def test_figures_never_count_the_first_step(script):
    figures = script("variants").figures
    rows = [{"seconds": s, "loss": 1.0, "memory": {"peak": p}} for s, p in ((50.0, 9), (2.0, 7), (2.0, 8))]
    report = {"tokens_per_step": 100, "steps": rows}
    found = figures(report, "done")
    assert found["tokens_per_s"] == 50 and found["first_step_s"] == 50 and found["peak"] == 9
    assert figures(report | {"steps": rows[:1]}, "stopped after 9 s")["tokens_per_s"] is None
    assert figures(None, "failed (1): x")["losses"] == []


def test_ablations_have_the_active_parameters_of_the_hybrid(script):
    model = load_config("hymo_750m").model
    active = {
        name: parameter_counts(model.model_copy(update=changes)).active
        for name, changes in script("ablations").shapes(model).items()
    }
    assert active["dense"] == pytest.approx(active["hybrid"], rel=0.001)
    assert active["attention"] == pytest.approx(active["hybrid"], rel=0.03)


def test_curves_are_compared_over_the_steps_that_both_made(script):
    difference = script("curves").largest_difference
    assert difference({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.5], "c": [3.1]}) == pytest.approx(0.5)
    assert difference({"a": [3.0]}) == 0.0
