"""metrics.jsonl and what is printed of it: torn lines, non-finite numbers, units, peaks of devices."""

import errno
import json
import math

import pytest
import torch

from hymo.observe.log import step_line
from hymo.observe.metrics import MetricsFile, device_peak_flops, has_evaluation, memory_bytes, read_metrics
from hymo.observe.units import count, duration, size


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 of next year", None),
        ("Another A100", None),
    ],
)
def test_dense_bf16_peak_by_the_whole_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_flops(torch.device("cuda")) == peak


def test_a_cpu_has_no_peak():
    assert device_peak_flops(torch.device("cpu")) is None


def test_memory_is_told_apart(monkeypatch):
    """Allocated, reserved, and the peak of each (pytorch/torchtitan#735: one number says little)."""
    names = {"memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 3, "max_memory_reserved": 4}
    for name, size_ in names.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, n=size_: n)
    assert memory_bytes(torch.device("cuda")) == {
        "memory_allocated": 1, "memory_reserved": 2, "memory_peak": 3, "memory_peak_reserved": 4,
    }  # fmt: skip
    assert memory_bytes(torch.device("cpu"))["memory_peak"] > 1e7


def write(path, attempt, *rows):
    file = MetricsFile(path, attempt)
    for row in rows:
        file.write(row)
    file.close()


def test_a_torn_last_line_is_cut_off_before_more_is_written(tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    write(path, 0, {"attempt": 1, "loss": 2.5}, {"attempt": 2, "loss": 2.25})
    with path.open("a") as file:
        file.write('{"attempt": 3, "lo')
    write(path, 2, {"attempt": 3, "loss": 2.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"attempt": 1, "loss": 2.5},
        {"attempt": 2, "loss": 2.25},
        {"attempt": 3, "loss": 2.0},
    ]


def test_rows_of_attempts_that_are_done_again_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, *({"attempt": a, "loss": float(a)} for a in (1, 2, 3)), {"attempt": 3, "val_loss": 1.0})
    write(path, 2, {"attempt": 3, "loss": 9.0})
    assert [(row["attempt"], row["loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


class Full:
    """A file on a disk with room for some bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()


def test_rows_wait_while_the_disk_is_full(tmp_path):
    """Said once; then each row stands there once. Switched off: a run ends by the row that has no place."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    assert file.write({"attempt": 1}) is None
    file._file = Full(file._file, room=5)
    assert "metrics.jsonl could not be written: No space left on device" in file.write({"attempt": 2})
    assert file.write({"attempt": 3}) is None, "told already"
    file._file.room = 1000
    assert file.write({"attempt": 4}) is None
    assert path.read_text() == "".join(f'{{"attempt": {n}}}\n' for n in (1, 2, 3, 4))
    file._file.room = 0
    assert "could not be written" in file.write({"attempt": 5})
    assert "lacks its last rows: No space" in file.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, {"attempt": 1, "loss": math.nan, "grad_norm": math.inf, "further": {"x": -math.inf, "y": 1.5}})
    assert path.read_text() == '{"attempt": 1, "loss": null, "grad_norm": null, "further": {"x": null, "y": 1.5}}\n'


def test_evaluations_stay_apart_whatever_the_sets_are_called(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"attempt": 1, "loss": 2.0, "skipped": False},
        {"attempt": 1, "books_loss": 2.5, "books_bpb": 3.5},
        {"attempt": 2, "loss": None, "skipped": True},
        {"attempt": 2, "val_loss": 2.5, "val_bpb": 3.5},
    ]
    write(path, 0, *rows)
    assert read_metrics(path) == rows


def test_whether_an_evaluation_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert not has_evaluation(path, 1)
    write(path, 0, {"attempt": 1, "loss": 2.0}, {"attempt": 1, "books_loss": 2.5}, {"attempt": 2, "loss": None})
    assert has_evaluation(path, 1)
    assert not has_evaluation(path, 2)


def test_of_an_attempt_that_stands_there_twice_the_last_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"attempt": 1, "loss": 3.0}, {"attempt": 2, "loss": 2.0}, {"attempt": 2, "loss": 1.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"attempt": 3')
    assert read_metrics(path) == [{"attempt": 1, "loss": 3.0}, {"attempt": 2, "loss": 1.0}]


def test_units():
    assert [duration(s) for s in (0, 59.4, 59.6, 185, 7620, 100800, math.inf)] == [
        "0s", "59s", "1m00s", "3m05s", "2h07m", "1d04h", "n/a",
    ]  # fmt: skip
    assert [count(n) for n in (950, 12_300, 4.1e6, 1.13e9)] == ["950", "12.3k", "4.10M", "1.13B"]
    assert [size(n) for n in (100, 2048, 512 << 20, 1.05 * 2**30)] == ["100 B", "2 KiB", "512 MiB", "1.05 GiB"]


ROW = {"step": 7, "loss": 2.34567, "grad_norm": 0.5, "lr_muon": 0.02, "lr_adamw": 3e-4}


def test_step_line():
    full = ROW | {"tokens_per_s": 12_300.0, "mfu": 0.4123, "memory_peak": 3 << 29, "data_wait": 0.012}
    assert step_line(full, 1000, 185.0) == (
        "step    7/1000 | loss 2.3457 | norm 0.500 | lr 2.00e-02 3.00e-04 |  12.3k tok/s | MFU 41.2% | mem 1.50 GiB | "
        "data 1.2% | ETA 3m05s"
    )
    skipped = ROW | {"loss": None, "grad_norm": math.nan, "skipped": True}
    line = step_line(skipped, 1000, math.inf)
    assert "loss nan | norm nan" in line
    assert "MFU n/a" in line
    assert line.endswith("ETA n/a | SKIPPED")
