"""trackio: the numbers of the rows in its local store, offline; a resumed run goes on under its name."""

import json
import sqlite3

import pytest

from hymo.config_io import load_config
from hymo.observe.trackers import open_trackers

trackio = pytest.importorskip("trackio")


def stored(folder):
    with sqlite3.connect(folder / "hymo.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = base.execute("select config from configs").fetchall()
    return [(name, step, json.loads(text)) for name, step, text in rows], configs


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
