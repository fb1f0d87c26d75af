import errno
import os
import threading
import time

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from hymo.checkpoint import manifest, saver, store
from hymo.checkpoint.saver import Saver, snapshot
from hymo.checkpoint.store import CheckpointError, load
from hymo.distributed import mesh, reduce


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until told to go on."""
    go = threading.Event()
    real = store._write_tensors

    def wait_then_write(*args):
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(store, "_write_tensors", wait_then_write)
    return go


def counting_state(value):
    return {"model": {"w": torch.full((1000,), float(value)), "n": torch.tensor(value)}}


def content(path):
    into = counting_state(-1)
    load(path, into)
    assert (into["model"]["w"] == into["model"]["n"]).all()
    return int(into["model"]["n"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_and_how_it_ended(tmp_path, asynchronous):
    s = Saver(tmp_path, asynchronous=asynchronous, keep=2)
    for step in (1, 2, 3):
        s.save(step, step, counting_state(step), {"step": step})
    assert s.wait()
    assert s.outcomes() == [tmp_path / "checkpoints" / f"step-{i}" for i in (1, 2, 3)]
    assert s.outcomes() == []
    assert [p.name for p in store.list_checkpoints(tmp_path)] == ["step-2", "step-3"]


def test_later_steps_do_not_leak_into_the_file(tmp_path, slow):
    """CPU tensors too are copied before the save returns (a view would hold the next step's: pytorch#144657)."""
    s, state, meta = Saver(tmp_path, asynchronous=True), counting_state(1), {"list": [1]}
    s.save(1, 1, state, meta)
    for tensor in state["model"].values():
        tensor.add_(100)
    meta["list"].append(999)
    assert not s.wait(0)
    slow.set()
    s.wait()
    assert content(s.outcomes()[0]) == 1
    assert store.read_manifest(tmp_path / "checkpoints" / "step-1").meta == {"list": [1]}


def test_each_save_holds_its_own_numbers(tmp_path):
    """A later save never re-writes an earlier one's bytes, though the copy's memory is used again."""
    s, state = Saver(tmp_path, asynchronous=True), counting_state(0)
    for step in range(1, 6):
        for tensor in state["model"].values():
            tensor.fill_(step)
        s.save(step, step, state, {})
    s.wait()
    assert [content(p) for p in s.outcomes()] == [1, 2, 3, 4, 5]


def test_one_save_at_a_time(tmp_path, slow):
    s = Saver(tmp_path, asynchronous=True)
    s.save(1, 1, counting_state(1), {})
    assert not s.wait(timeout=0.05)
    threading.Timer(0.2, slow.set).start()
    began = time.monotonic()
    s.save(2, 2, counting_state(2), {})
    assert time.monotonic() - began > 0.1
    s.wait()
    assert [p.name for p in s.outcomes()] == ["step-1", "step-2"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_outcome_and_the_next_save_works(tmp_path, monkeypatch, asynchronous):
    s = Saver(tmp_path, asynchronous=asynchronous)
    s.save(1, 1, counting_state(1), {})
    s.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        s.save(2, 2, counting_state(2), {})
        s.wait()
    s.save(3, 3, counting_state(3), {})
    s.wait()
    first, full, third = s.outcomes()
    assert (first.name, third.name) == ("step-1", "step-3")
    assert isinstance(full, CheckpointError)
    assert "No space left" in str(full)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step-1", "step-3"]


def test_an_unforeseen_error_in_the_background_is_not_lost(tmp_path, monkeypatch):
    s = Saver(tmp_path, asynchronous=True)
    monkeypatch.setattr(store, "_write_tensors", lambda *a: (_ for _ in ()).throw(ZeroDivisionError("oops")))
    s.save(1, 1, counting_state(1), {})
    s.wait()
    assert "oops" in str(s.outcomes()[0])


def test_a_snapshot_shares_nothing_and_its_memory_is_used_again():
    state = {"a": {"w": torch.nn.Parameter(torch.ones(3)), "s": torch.tensor(1)}, "gone": torch.ones(1)}
    first = snapshot(state)
    assert sorted(first) == ["a.s", "a.w", "gone"]
    assert first["a.w"].untyped_storage().data_ptr() != state["a"]["w"].untyped_storage().data_ptr()
    assert not first["a.w"].requires_grad
    memory = first["a.w"].data_ptr()
    del state["gone"]
    state["a"]["s"] = torch.ones(2, dtype=torch.int64)
    with torch.no_grad():
        state["a"]["w"].fill_(5)
    second = snapshot(state, into=first)
    assert sorted(second) == ["a.s", "a.w"]
    assert second["a.w"].data_ptr() == memory
    assert second["a.w"].tolist() == [5, 5, 5]
    assert second["a.s"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="a: found int"):
        snapshot({"a": 3})


def test_the_copy_is_what_protects(tmp_path, slow, monkeypatch):
    """The switch: without the copy the next step does leak."""
    monkeypatch.setattr(saver, "snapshot", lambda state, into: store.flatten(state))
    s, state = Saver(tmp_path, asynchronous=True), counting_state(1)
    s.save(1, 1, state, {})
    state["model"]["w"].add_(100)
    state["model"]["n"].add_(100)
    slow.set()
    s.wait()
    assert content(s.outcomes()[0]) == 101
    assert manifest.is_whole(tmp_path / "checkpoints" / "step-1", hashes=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_state_is_copied_into_pinned_memory_once(tmp_path):
    """Sharded and plain tensors of a GPU: pinned copies, used again, and each save holds its own numbers."""
    mesh.ensure_group(torch.device("cuda"))
    try:
        grid = mesh.build_mesh("cuda")["dp_shard"]
        plain, wide = torch.zeros(1000, device="cuda"), torch.zeros(64, 8, device="cuda")
        sharded = distribute_tensor(wide, grid, [Shard(0)])
        state = {"plain": plain, "sharded": sharded, "empty": torch.zeros(0, device="cuda")}
        s = Saver(tmp_path, asynchronous=True)
        for step in (1, 2, 3):
            plain.fill_(step)
            sharded.to_local().fill_(10 * step)
            s.save(step, step, state, {})
            plain.fill_(-1)
            sharded.to_local().fill_(-1)
        s.wait()
        assert s._copy["plain"].is_pinned()
        assert reduce.local(s._copy["sharded"]).is_pinned()
        for step, path in enumerate(s.outcomes(), start=1):
            load(path, state)
            assert (plain == step).all()
            assert (sharded.to_local() == 10 * step).all()
    finally:
        mesh.shutdown()
