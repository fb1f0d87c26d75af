"""trackio: the numbers of the rows in its local store, offline; a resumed run goes on under its name."""

import json
import sqlite3
import struct
import sys
import time

import pytest

from hymo.cli import main
from hymo.config_io import load_config
from hymo.observe.trackers import numbers, open_trackers

ROWS = [
    {"loss": 1.5, "val_bpb": 2.0, "expert_load": [[1, 2], [3, 4]], "skipped": False, "mfu": None},
    {"loss": 1.25, "val_bpb": 1.5, "expert_load": [[4, 3], [2, 1]], "skipped": True, "mfu": 0.5},
]

trackio = pytest.importorskip("trackio")


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_an_absent_package_is_said_before_anything_is_read_or_made(
    name, module, small_flags, tmp_path, monkeypatch, capsys
):
    """So that the same command works after the package was installed."""
    monkeypatch.setattr("hymo.training.trainer.prepare_data", lambda *_: pytest.fail("text was read"))
    monkeypatch.setitem(sys.modules, module, None)
    run = tmp_path / "run"
    assert main(["train", *small_flags, f"--logging.trackers=[{name}]", "--run-dir", str(run)]) == 2
    assert f"logging.trackers: found {name} without its package; accepted: pip install 'hymo[track]'" in (
        capsys.readouterr().err
    )
    assert not run.exists()


def stored(folder):
    with sqlite3.connect(folder / "hymo.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = base.execute("select config from configs").fetchall()
    return [(name, step, json.loads(text)) for name, step, text in rows], configs


def log_records(content: bytes):
    """The records of a W&B offline file, a log as LevelDB's: blocks of 32 KiB, of pieces with a header of 7 bytes."""
    at, record = 7, b""  # after the file's own header
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def test_trackio_has_the_numbers_and_a_resumed_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "store")
    run = tmp_path / "run"
    run.mkdir()
    config = load_config("tiny", ["--logging.trackers=trackio"])
    for step in (1, 2):
        (tracker,) = open_trackers(config, run, step - 1)
        tracker.log(step, {"loss": 1.5 * step, "load": [1, 2], "skipped": False, "mfu": None})
        tracker.close()
    rows, configs = stored(tmp_path / "store")
    name = json.loads((run / "trackio.json").read_text())["name"]
    assert rows == [(name, step, {"loss": 1.5 * step, "load/0": 1.0, "load/1": 2.0, "skipped": 0.0}) for step in (1, 2)]
    assert name.startswith("run-")
    assert any(b"muon_lr" in (c if isinstance(c, bytes) else c.encode()) for (c,) in configs)
    assert capsys.readouterr().out == ""


def test_all_trackers_have_the_same_names_and_numbers_and_go_on_in_the_same_place(tmp_path, monkeypatch):
    """Two lives of one run, a row each: one record under each tracker, with every number of both rows."""
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "store")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    run.mkdir()
    config = load_config("tiny", ["--logging.trackers=[tensorboard, wandb, trackio]"])
    for step, row in enumerate(ROWS, 1):
        trackers = open_trackers(config, run, step - 1)
        for tracker in trackers:
            tracker.log(step, row)
        for tracker in trackers:
            tracker.close()
        time.sleep(1.1)  # TensorBoard sorts its files by second, then by a count as text: 10 comes before 9
    expected = {(step, name): number for step, row in enumerate(ROWS, 1) for name, number in numbers(row).items()}
    assert {"loss", "val_bpb", "expert_load/1/0", "skipped"} <= {name for _, name in expected}

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    board = {(event.step, tag): event.value for tag in tags for event in events.Scalars(tag)}
    assert board == pytest.approx(expected)

    kept, _ = stored(tmp_path / "store")
    assert len({name for name, _, _ in kept}) == 1
    assert {(step, name): x for _, step, row in kept for name, x in row.items()} == pytest.approx(expected)

    identity, online = json.loads((run / "wandb.json").read_text())["id"], {}
    for file in (run / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            items = {name: value for name, value in items.items() if not name.startswith("_")}
            online |= {(items["step"], name): value for name, value in items.items() if name != "step"}
    assert online == pytest.approx(expected)
