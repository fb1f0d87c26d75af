"""Reading a checkpoint's ``.metadata`` without running anything.

torch's distributed checkpoints (DCP) describe their tensors in a pickle, and a pickle can call any function. So it is
read by an unpickler that knows a handful of plain record types and refuses every other name before it is looked up, and
what comes out is checked to describe tensors in files of this folder and nothing else. DCP reads the records from here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hymo.checkpoint.manifest import METADATA, CheckpointError

_RECORDS = "torch.distributed.checkpoint.metadata"
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
ALLOWED = {
    *((_RECORDS, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_RECORDS, name) for name in ("MetadataIndex", "StorageMeta", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # a look-up of a layout by its name
    *(("torch", name) for name in _DTYPES),
}
"""Every name that a ``.metadata`` may mention: records without behaviour."""


def _member(owner: Any, name: str) -> Any:
    """What stands for ``getattr``, with which early releases of Python 3.11 pickle the members of enumerations."""
    members = owner.__members__ if isinstance(owner, type) and issubclass(owner, Enum) else {}
    if name not in members:
        raise pickle.UnpicklingError("it names builtins.getattr for something other than a member of an enumeration")
    return members[name]


class _RecordsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a description of tensors never does")
        return super().find_class(module, name)


def read_metadata(path: Path, files: Collection[str]) -> Metadata:
    """The records of ``PATH/.metadata``; ``files`` are the names that the manifest lists.

    Raises CheckpointError, with nothing of the file executed, if it mentions any other type, stores anything but
    tensors, or points outside ``files``.
    """
    try:
        metadata = _RecordsOnly(io.BytesIO((path / METADATA).read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path / METADATA}: cannot be read ({error})") from None
    except Exception as error:  # a hostile pickle can raise anything
        raise CheckpointError(f"{path / METADATA} is refused, unexecuted: {error}") from None
    if fault := _fault(metadata, files):
        raise CheckpointError(f"{path / METADATA} is refused: {fault}")
    return metadata


def lost_pieces(metadata: Metadata) -> list[str]:
    """Tensors of which a piece has no place in any file."""
    placed = set(metadata.storage_data)
    return [
        key
        for key, record in metadata.state_dict_metadata.items()
        if isinstance(record, TensorStorageMetadata)
        if any(MetadataIndex(key, chunk.offsets) not in placed for chunk in record.chunks)
    ]


def _fault(metadata: Any, files: Collection[str]) -> str | None:
    if type(metadata) is not Metadata or type(metadata.state_dict_metadata) is not dict:
        return "it does not describe a state"
    if type(metadata.storage_data) is not dict:
        return "it does not say where the tensors are"
    for key, record in metadata.state_dict_metadata.items():
        if type(record) is BytesStorageMetadata:
            return f"{key!r} is stored as a pickled object; accepted: tensors"
        if type(key) is not str or type(record) is not TensorStorageMetadata:
            return f"{key!r} is not a tensor"
    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or index.fqn not in metadata.state_dict_metadata:
            return f"it places {index!r}, which is not part of the state"
        if place.relative_path not in files:
            return f"{index.fqn!r} is placed in {place.relative_path!r}, which the manifest does not list"
        if getattr(place, "transform_descriptors", None):
            return f"{index.fqn!r} is stored through a transformation; accepted: plain tensors"
    return None


class SafeReader(FileSystemReader):
    """DCP's reader of files, handed records that were checked once (they are not read a second time)."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._checked = metadata

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._checked


class TensorPlanner(DefaultLoadPlanner):
    """DCP's planner of loads for a flat dict of tensors; a pickled object is refused here too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is a pickled object; accepted: tensors")
