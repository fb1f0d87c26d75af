"""The watchdog on real processes, with its times shortened: patience 1 s instead of 25."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hymo.distributed import reduce
from hymo.observe.watchdog import Watchdog

FAST = {"interval_s": 0.1, "patience_s": 1.0}


@pytest.fixture(scope="module")
def processes():
    """A pool of its own: these tests kill it."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    spec = importlib.util.spec_from_file_location("gloo_pool_killed", Path(__file__).parents[1] / "gloo_pool.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pool = module.Pool()
    yield pool
    pool.close()


def nothing():
    pass


def wait_for_ever_unless_rank_1(run, what):
    with Watchdog(Path(run), **FAST):
        if reduce.rank() == 1:
            time.sleep(0.3)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raises":
                raise KeyError("a bad batch")
        time.sleep(60)  # as in a collective that waits for the others


@pytest.mark.parametrize("what", ["killed", "raises"])
def test_a_rank_that_dies_ends_the_job_with_everybodys_stacks(processes, tmp_path, what, capfd):
    processes(3, nothing)  # the pool's start takes its time
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 died"):
        processes(3, wait_for_ever_unless_rank_1, str(tmp_path), what, timeout=40)
    assert time.monotonic() - began < 30, "they would have waited for 60"
    stacks = {p.name: p.read_text() for p in (tmp_path / "stacks").iterdir()}
    assert {"rank-0.txt", "rank-2.txt"} <= set(stacks)
    reason = "rank 1 raised KeyError" if what == "raises" else "rank 1 has not answered for 1 s"
    assert all(reason in text for text in stacks.values())
    assert "in wait_for_ever_unless_rank_1" in stacks["rank-0.txt"]
    if what == "raises":
        assert 'raise KeyError("a bad batch")' in stacks["rank-1.txt"]
    assert "ending the job: " + reason in capfd.readouterr().err


def late(run):
    """Rank 1 is late by three times the patience, in Python and in a wait for the store; the others wait for it."""
    with Watchdog(Path(run), **FAST):
        if reduce.rank() == 1:
            time.sleep(1.5)
            store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
            threading.Timer(1.5, lambda: store.clone().set("come", "1")).start()
            store.wait(["come"])
        return reduce.sum_across(torch.tensor(1.0)).item()


def test_a_rank_that_is_late_does_not(processes, tmp_path):
    assert processes(3, late, str(tmp_path)) == [3.0] * 3
    assert not (tmp_path / "stacks").exists()


def in_turn():
    """Ranks end one after the other, further apart than the patience: nobody takes the early for dead."""
    with Watchdog(None, **FAST):
        time.sleep(0.2 + 1.2 * reduce.rank())
    return "well"


def test_ranks_that_end_at_different_times_are_no_alarm(processes):
    assert processes(3, in_turn) == ["well"] * 3


def test_one_process_only_watches_for_stalls(tmp_path, capsys):
    with Watchdog(tmp_path, interval_s=0.05, stall_s=0.3) as watchdog:
        for _ in range(8):
            time.sleep(0.08)
            watchdog.tick()
        assert not (tmp_path / "stacks").exists()
        time.sleep(1.0)
    text = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert text.count("nothing has moved on for 0 s") == 1, "told once"
    assert "test_one_process_only_watches_for_stalls" in text
    assert "stacks in" in capsys.readouterr().err


def test_a_worker_whose_launcher_is_gone_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ended = threading.Event()
    with Watchdog(tmp_path, interval_s=0.05, end=lambda code: ended.set()) as watchdog:
        assert not ended.wait(0.2)
        watchdog._launcher = 1 if os.getppid() != 1 else 2
        assert ended.wait(2)
    assert "the launcher of this job is gone" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def test_a_store_that_is_gone_is_a_host_that_is_gone(tmp_path):
    class Gone(dist.HashStore):
        gone = False

        def set(self, *args):
            if self.gone:
                raise dist.DistNetworkError("Connection reset by peer")
            super().set(*args)

    store, ended = Gone(), threading.Event()
    with Watchdog(tmp_path, interval_s=0.05, end=lambda code: ended.set(), store=store, who=(0, 2)):
        store.gone = True
        assert ended.wait(2)
    assert "the job's store does not answer" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def test_a_full_disk_does_not_keep_a_job_from_ending(tmp_path):
    (tmp_path / "stacks").write_text("a file where the folder should be")
    ended, store = [], dist.HashStore()
    with Watchdog(tmp_path, interval_s=0.05, end=ended.append, store=store, who=(0, 2)):
        store.set("alarm", "rank 1 raised OSError")
        time.sleep(0.5)
    assert ended == [1]


def test_a_reader_that_is_gone_does_not_keep_a_job_from_ending(tmp_path, monkeypatch):
    """The pipe behind stderr may have ended with the launcher. Switched off: the thread dies, the process stays."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

    ended = []
    monkeypatch.setattr("sys.stderr", Gone())
    Watchdog(tmp_path, end=ended.append, store=dist.HashStore(), who=(0, 2))._finish("the launcher of this job is gone")
    assert ended == [1]
