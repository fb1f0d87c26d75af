"""A checkpoint is data: no file of it may run anything. Every attack here works against plain ``pickle.load``."""

import os
import pickle
import pickletools
from enum import Enum
from io import BytesIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from hymo.checkpoint import manifest
from hymo.checkpoint.safe_metadata import ALLOWED, read_metadata
from hymo.checkpoint.store import CheckpointError, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Colour(Enum):
    RED = 1


class ByName(pickle.Pickler):
    """Pickles the members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Call:
    """Pickles as a call of ``function(*arguments)``, which unpickling makes."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def resign(path):
    """Make the manifest agree with the files again, as whoever alters a checkpoint would."""
    record = manifest._read(path)
    for name in record.files:
        record.files[name].update(size=(path / name).stat().st_size, sha256=manifest.sha256(path / name))
    (path / "manifest.json").write_text(record.to_json())


@pytest.fixture
def checkpoint(tmp_path, state):
    return save(tmp_path / "run", 1, 1, state, {})


def hide_in_metadata(path, attack):
    """Records that are right in every way, with a call inside."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = attack
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    resign(path)


def attacks(victim):
    return {
        "os.system": Call(os.system, f"touch {victim}"),
        "builtins.exec": Call(exec, f"open({str(victim)!r}, 'w').close()"),
        "torch.load": Call(torch.load, str(victim)),
        "getattr": Call(getattr, "text", "upper"),
        "getattr of a record": Call(getattr, Metadata, "__init__"),
        "getattr of an enumeration": Call(getattr, Colour, "mro"),
        "nested": {"a": [Call(eval, f"open({str(victim)!r}, 'w')")]},
    }


@pytest.mark.parametrize("name", list(attacks("")))
def test_a_metadata_that_would_run_a_command_is_refused_unexecuted(checkpoint, blank, tmp_path, name):
    victim = tmp_path / "victim"
    hide_in_metadata(checkpoint, attacks(victim)[name])
    before = blank["counts"].clone()
    with pytest.raises(CheckpointError, match=r"\.metadata is refused, unexecuted: it names "):
        load(checkpoint, blank)
    assert not victim.exists()
    assert torch.equal(before, blank["counts"])


def test_the_attack_would_have_worked_on_plain_dcp(checkpoint, blank, tmp_path):
    """The switch: without the restricted reader the command runs."""
    hide_in_metadata(checkpoint, attacks(tmp_path / "victim")["os.system"])
    dcp.load({"counts": blank["counts"]}, checkpoint_id=checkpoint, no_dist=True)
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("tail", ["whole file", "appended", "dotted name", "extension"])
def test_raw_pickles(checkpoint, blank, tmp_path, tail):
    victim = tmp_path / "victim"
    good = (checkpoint / ".metadata").read_bytes()
    command = f"touch {victim}".encode()
    system = b"cposix\nsystem\n(S'" + command + b"'\ntR."
    raw = {
        "whole file": system,
        "appended": good[:-1] + b"0" + system,
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x0bSize.__base__\x93.",
        "extension": b"\x82\x01.",
    }[tail]
    (checkpoint / ".metadata").write_bytes(raw)
    resign(checkpoint)
    with pytest.raises(CheckpointError, match="refused"):
        load(checkpoint, blank)
    assert not victim.exists()


def test_a_pickled_object_in_a_tensor_file_is_refused(tmp_path, blank):
    """DCP stores what is no tensor as a pickle and unpickles it on loading: such entries are not read at all."""
    path = save(tmp_path, 1, 1, {"a": torch.zeros(2), "b": torch.zeros(2)}, {})
    plain = tmp_path / "plain"
    hidden = Call(os.system, f"touch {tmp_path / 'victim'}")
    dcp.save({"a": torch.zeros(2), "b": hidden}, checkpoint_id=plain, no_dist=True)
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes((plain / name).read_bytes())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta = metadata.planner_data = None
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    resign(path)
    with pytest.raises(CheckpointError, match="'b' is stored as a pickled object; accepted: tensors"):
        load(path, {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert not (tmp_path / "victim").exists()


def test_files_outside_the_manifest_are_not_read(checkpoint, tmp_path, blank):
    torch.save(torch.zeros(8, 5), tmp_path / "outside")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../../outside"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resign(checkpoint)
    with pytest.raises(CheckpointError, match="which the manifest does not list"):
        load(checkpoint, blank)


def test_a_damaged_tensor_pickle_cannot_execute(tmp_path):
    """Tensors themselves are read with weights_only."""
    path = save(tmp_path, 1, 1, {"a": torch.zeros(2)}, {})
    victim = tmp_path / "victim"
    torch.save(Call(os.system, f"touch {victim}"), path / "__0_0.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.length = (path / "__0_0.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    resign(path)
    with pytest.raises(CheckpointError, match=r"could not be read.*(Weights only load failed|posix.system)"):
        load(path, {"a": torch.zeros(2)})
    assert not victim.exists()


def test_a_file_of_any_python_is_read(checkpoint, blank, state):
    """Early releases of Python 3.11, Debian's 3.11.2 for one, name members of enumerations by ``getattr``."""
    buffer = BytesIO()
    ByName(buffer).dump(pickle.loads((checkpoint / ".metadata").read_bytes()))
    assert b"getattr" in buffer.getvalue()
    (checkpoint / ".metadata").write_bytes(buffer.getvalue())
    resign(checkpoint)
    load(checkpoint, blank)
    assert torch.equal(blank["counts"], state["counts"])


def test_every_name_of_an_honest_file_is_a_record(checkpoint):
    """The allow-list is what DCP writes today and nothing that acts: classes of records, dtypes, one look-up."""
    strings: list[str] = []
    used = set()
    for op, argument, _ in pickletools.genops((checkpoint / ".metadata").read_bytes()):
        if isinstance(argument, str):
            strings.append(argument)
        if op.name == "STACK_GLOBAL":
            used.add(strings[-1])
    assert used <= {name for _, name in ALLOWED} | {"getattr"}  # the last in early releases of Python 3.11
    assert read_metadata(checkpoint, manifest._read(checkpoint).files).state_dict_metadata
