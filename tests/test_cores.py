"""The share of the host's cores."""

import os

import pytest

from hymo.cores import own_cores


def test_processes_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = own_cores()
    assert cores >= 1
    for processes in (2, 1000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert own_cores() == max(1, cores // processes)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_cores_that_a_process_is_kept_from_do_not_count(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert own_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
