import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hymo.checkpoint import manifest, store
from hymo.checkpoint.safe_metadata import SafeReader
from hymo.checkpoint.store import CheckpointError, latest, load, read_manifest, save

META = {"config": {"model": {"dim": 8}}, "rng": [1, 2, 3], "position": 40}


def same(a, b):
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(left, right, strict=True)
    )


def flip_a_byte(file: Path, at: int = -100):
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


def test_a_save_comes_back_bit_for_bit(tmp_path, state, blank):
    path = save(tmp_path, 5, 6, state, META)
    assert path == tmp_path / "checkpoints" / "step-5"
    record = load(path, blank)
    assert same(state, blank)
    assert (record.step, record.attempt, record.meta, record.world_size) == (5, 6, META, 1)
    assert record.sections == {"model": 3, "optimizer": 2, "counts": 1}
    assert record.tensors["model.layers.0.w"] == ["float32", 8, 5]
    assert set(record.files) | {"manifest.json"} == {p.name for p in path.iterdir()}
    assert (tmp_path / "latest").read_text() == "checkpoints/step-5\n"


def test_a_save_that_lost_a_tensor_is_not_committed(tmp_path, state, monkeypatch):
    """A writer that returns without an error, but also without one of the tensors."""
    real = store._Writer.finish

    def finish(self, metadata, results):
        real(self, metadata, [results[0][1:]])

    monkeypatch.setattr(store._Writer, "finish", finish)
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved.*not all tensors were written: \w+"):
        save(tmp_path, 1, 1, state, {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_loading_is_in_place(tmp_path, state, blank):
    blank["model"]["layers.0.w"] = torch.nn.Parameter(blank["model"]["layers.0.w"])
    kept = tree_leaves(blank)
    load(save(tmp_path, 1, 1, state, {}), blank)
    assert all(a is b for a, b in zip(kept, tree_leaves(blank), strict=True))
    assert torch.equal(blank["model"]["layers.0.w"], state["model"]["layers.0.w"])


def test_nothing_is_written_over(tmp_path, state):
    names = [save(tmp_path, 5, attempt, state, {}).name for attempt in (5, 6, 9)]
    assert names == ["step-5", "step-5-a6", "step-5-a9"]
    assert latest(tmp_path).name == "step-5-a9"


def test_a_state_that_is_saved_already_is_not_saved_again(tmp_path, state):
    first = save(tmp_path, 5, 6, state, META)
    times = {p.name: p.stat().st_mtime_ns for p in first.iterdir()}
    assert save(tmp_path, 5, 6, state, META) == first
    assert {p.name: p.stat().st_mtime_ns for p in first.iterdir()} == times
    flip_a_byte(next(first.glob("*.distcp")))  # whole by its sizes, so only its contents tell
    assert save(tmp_path, 5, 6, state, META).name == "step-5-a6"
    flip_a_byte(next((tmp_path / "checkpoints" / "step-5-a6").glob("*.distcp")))
    assert save(tmp_path, 5, 6, state, META).name == "step-5-a6-r2"
    assert latest(tmp_path).name == "step-5-a6-r2"


def test_the_newest_is_by_attempt_not_by_step(tmp_path, state):
    """A run that went back (to skip bad data) has its newest state at a lower step."""
    save(tmp_path, 30, 30, state, {})
    save(tmp_path, 20, 45, state, {})
    assert latest(tmp_path).name == "step-20"


def test_latest_is_found_by_looking(tmp_path, state):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for step in (1, 2, 3):
        save(tmp_path, step, step, state, {})
    (tmp_path / "latest").write_text("checkpoints/step-9\n")
    (tmp_path / "checkpoints" / "step-77").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("")
    assert latest(tmp_path).name == "step-3"
    next((tmp_path / "checkpoints" / "step-3").glob("*.distcp")).write_bytes(b"")
    assert latest(tmp_path).name == "step-2"
    (tmp_path / "checkpoints" / "step-2" / "manifest.json").write_text("{")
    assert latest(tmp_path).name == "step-1"


# --- what is refused, with the state untouched ---


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "manifest flipped"])
def test_a_damaged_one_is_named_and_the_one_before_is_offered(tmp_path, state, blank, damage):
    save(tmp_path, 1, 1, state, META)
    path = save(tmp_path, 2, 2, state, META)
    tensors = next(path.glob("*.distcp"))
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif damage == "flipped":
        flip_a_byte(tensors)
    elif damage == "missing":
        tensors.unlink()
    elif damage == "manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-20])
    else:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"position": 40', '"position": 41'))
    before = tree_map(torch.clone, blank)
    name = "manifest.json" if "manifest" in damage else tensors.name
    with pytest.raises(CheckpointError, match=rf"(?s)step-2.*{name}|{name}.*step-2") as error:
        load(path, blank)
    assert error.value.alternative == tmp_path / "checkpoints" / "step-1"
    assert "step-1, is whole" in str(error.value)
    assert same(before, blank)


@pytest.mark.parametrize("refused", ["open", "stat"])
def test_a_file_that_cannot_be_read_is_a_fault_like_another(tmp_path, state, blank, monkeypatch, refused):
    """Rights, or a disk: it is named, the one before is offered, and `inspect` tells of the rest."""
    save(tmp_path, 1, 1, state, {})
    path = save(tmp_path, 2, 2, state, {})
    owner, name = (manifest, "sha256") if refused == "open" else (Path, "stat")
    real = getattr(owner, name)

    def refuse(file, *args, **kwargs):
        if Path(file).suffix == ".distcp" and "step-2" in str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read \(Permission denied\); .*step-1, is whole"):
        load(path, blank)
    assert "NO: __0_0.distcp cannot be read" in store.inspect(path)


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_an_empty_one(tmp_path, state, monkeypatch):
    """Or --resume would begin anew."""
    save(tmp_path, 1, 1, state, {})

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read \(Permission denied\)"):
        latest(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved in .*Permission denied"):
        save(tmp_path, 2, 2, state, {})


def test_two_damaged_ones_offer_nothing(tmp_path, state, blank):
    for step in (1, 2):
        next(save(tmp_path, step, step, state, {}).glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "checkpoints" / "step-2", blank)
    assert error.value.alternative is None


def test_hashes_can_be_left_out_but_sizes_not(tmp_path, state, blank):
    path = save(tmp_path, 1, 1, state, {})
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, not \d+"):
        load(path, blank, hashes=False)


def test_a_newer_format_is_refused(tmp_path, state, blank, monkeypatch):
    path = save(tmp_path, 1, 1, state, {})
    body = json.loads((path / "manifest.json").read_text()) | {"format": 2, "new_field": 1}
    (path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"written in format 2 by hymo .*; accepted here: up to format 1"):
        load(path, blank)


def test_another_model_is_refused_with_the_difference(tmp_path, state, blank):
    path = save(tmp_path, 1, 1, state, {})
    model = blank["model"]
    model["layers.0.w"] = torch.zeros(8, 6)
    model["layers.0.b"] = torch.zeros(5)
    model["layers.1.w"] = model.pop("half")
    before = tree_map(torch.clone, blank)
    with pytest.raises(CheckpointError) as error:
        load(path, blank)
    text = str(error.value)
    assert "missing in it: model.layers.1.w" in text
    assert "unexpected in it: model.half" in text
    assert "model.layers.0.w (float32 [8, 5] there, float32 [8, 6] here)" in text
    assert "model.layers.0.b (float64 [5] there, float32 [5] here)" in text
    assert same(before, blank)


def test_a_part_that_is_missing_is_never_passed_over(tmp_path, state, blank):
    """A part that was never saved went unnoticed elsewhere (KempnerInstitute/KempnerForge#51)."""
    del state["optimizer"]
    path = save(tmp_path, 1, 1, state, {})
    with pytest.raises(CheckpointError, match="missing in it: optimizer"):
        load(path, blank)
    load(path, blank, only=("model",))
    assert same(state["model"], blank["model"])
    assert (blank["counts"] == 77).all()


def test_a_whole_checkpoint_gives_its_weights_alone(tmp_path, state, blank):
    path = save(tmp_path, 1, 1, state, {})
    with pytest.raises(CheckpointError, match="unexpected in it: counts, optimizer"):
        load(path, {"model": blank["model"]})
    load(path, {"model": blank["model"]}, only=["model"])
    assert same(state["model"], blank["model"])


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"a": {"b": 3}}, "a.b: found int"),
        ({"a": [torch.zeros(1)]}, "a: found list"),
        ({"x": None}, "x: found NoneType"),
    ],
)
def test_tensors_only(tmp_path, bad, message):
    with pytest.raises(TypeError, match=message):
        save(tmp_path, 1, 1, bad, {})
    assert not (tmp_path / "checkpoints").exists()


def test_doubled_keys_and_foreign_meta_are_refused(tmp_path, state):
    with pytest.raises(ValueError, match=r"a\.b: two entries"):
        save(tmp_path, 1, 1, {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, {})
    with pytest.raises(TypeError, match=r"meta: .*; accepted: JSON values"):
        save(tmp_path, 1, 1, state, {"tensor": torch.zeros(1)})
    assert not (tmp_path / "checkpoints").exists()


# --- a disk that fills up ---


@pytest.mark.parametrize("call", range(1, 5))
def test_a_full_disk_tears_nothing_and_the_next_save_works(tmp_path, state, blank, monkeypatch, call):
    """The n-th fsync (tensors, metadata, manifest, folder) finds no space: an error, the old checkpoint intact."""
    save(tmp_path, 1, 1, state, {})
    real, calls = os.fsync, []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left"):
        save(tmp_path, 2, 2, state, {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert save(tmp_path, 2, 2, state, {}).name == "step-2"
    load(latest(tmp_path), blank)
    assert same(state, blank)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    def read_only(file, text):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(manifest, "write_durably", read_only)
    with pytest.raises(CheckpointError, match=r"run: cannot be written \(Read-only file system\); accepted: "):
        store.prove_shared(tmp_path / "run")


def test_what_the_disk_said_is_told_not_what_torch_made_of_it():
    """On a full disk torch's writer of a file raises a position that it did not expect while it handles the error."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert store._say(error) == "OSError: [Errno 28] No space left on device"
    assert store._say(RuntimeError("else")) == "RuntimeError: else"


def test_an_unwritable_run_folder_is_one_clear_error(tmp_path, state):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="step 1 could not be saved in"):
        save(tmp_path, 1, 1, state, {})


# --- retention ---


def names(run):
    return [p.name for p in store.list_checkpoints(run)]


def test_retention_keeps_the_newest_the_multiples_the_protected_and_the_pinned(tmp_path, state):
    for step in range(1, 11):
        path = save(tmp_path, step, step, state, {}, keep=2, keep_every=4, protect=(7,))
        if step == 5:
            manifest.pin(path, "parent of ../decay")
    assert names(tmp_path) == ["step-4", "step-5", "step-7", "step-8", "step-9", "step-10"]


def test_retention_counts_whole_ones_only(tmp_path, state):
    """Damaged ones do not push good ones out, and the last good one is never removed."""
    good = save(tmp_path, 1, 1, state, {})
    for step in (2, 3):
        next(save(tmp_path, step, step, state, {}).glob("*.distcp")).unlink()
    assert manifest.prune(tmp_path, keep=1) == []
    assert good.exists()
    save(tmp_path, 4, 4, state, {}, keep=1)
    assert names(tmp_path) == ["step-4"]
    assert (tmp_path / "checkpoints" / "step-3").exists()


def test_retention_of_nothing(tmp_path):
    """An empty or missing folder is fine (pytorch/torchtitan#909)."""
    assert manifest.prune(tmp_path, keep=1) == []
    assert manifest.prune(tmp_path / "nowhere", keep=None) == []
    with pytest.raises(ValueError, match="keep: found 0"):
        manifest.prune(tmp_path, keep=0)


def test_a_checkpoint_that_cannot_be_removed_ends_nothing(tmp_path, state, monkeypatch):
    """It stays, the others go, and what was saved is returned; also where the folder cannot be listed."""
    for step in (1, 2):
        save(tmp_path, step, step, state, {})
    (tmp_path / "checkpoints" / ".removing-step-1").write_text("a folder cannot be renamed to a file")
    with pytest.warns(UserWarning, match=r"step-1 could not be removed: .*\.removing-step-1"):
        assert save(tmp_path, 3, 3, state, {}, keep=1).name == "step-3"
    assert names(tmp_path) == ["step-1", "step-3"]

    def stale(*args):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(manifest, "prune", stale)
    with pytest.warns(UserWarning, match="Stale file handle"):
        assert save(tmp_path, 4, 4, state, {}, keep=1).name == "step-4"


def test_leftovers_of_killed_saves_are_swept(tmp_path, state):
    (tmp_path / "checkpoints" / ".writing-step-9-a9").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".removing-step-8").mkdir()
    save(tmp_path, 1, 1, state, {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


# --- for people ---


def test_inspect_says_what_is_there(tmp_path, state):
    path = save(tmp_path, 1234, 1240, state, META)
    text = manifest.inspect(path)
    assert "1,234 updates, attempt 1,240" in text
    assert re.search(r"whole +yes\n", text)
    assert "model     3 tensors, 51 numbers (bfloat16, float32, float64)" in text
    assert 'model: {"dim": 8}' in text
    flip_a_byte(next(path.glob("*.distcp")))
    assert "whole       NO: __0_0.distcp has another SHA-256" in manifest.inspect(path)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        read_manifest(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        read_manifest(tmp_path)


def test_a_shared_folder_is_proved_and_leaves_no_trace(tmp_path):
    store.prove_shared(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_ctrl_c_while_reading_is_no_damage(tmp_path, monkeypatch):
    """DCP wraps it like a failure to read."""
    path = save(tmp_path, 1, 1, {"model": {"w": torch.ones(3)}}, {})

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(SafeReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(path, {"model": {"w": torch.zeros(3)}})
