"""Process groups and the device mesh.

One process without torchrun has no group and needs none. Under torchrun (its environment variables are read) the
default group carries CPU tensors over gloo and CUDA tensors over NCCL. The mesh has two named axes: ``dp_replicate``
(copies of the model) and ``dp_shard`` (pieces of one copy); expert and context parallelism would add ``ep`` and ``cp``.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hymo.distributed.reduce import is_distributed, world_size
from hymo.errors import HyMoError

REPLICATE, SHARD = "dp_replicate", "dp_shard"
FIRST_TIMEOUT_S = 600.0
"""Start-up may compile and read data; the trainer tightens this once steps run (``set_timeout``)."""


def launched_by_torchrun() -> bool:
    """Whether this process is one of a torchrun job (of any size)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def may_be_restarted() -> bool:
    """Whether torchrun's elastic agent would start this job again after a failure (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def restarted_by_torchrun() -> bool:
    """Whether torchrun's elastic agent started this job again after a failure: it then goes on where it was."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_rank() -> int:
    """This process's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def pick_device(name: str = "auto") -> torch.device:
    """``auto`` | ``cpu`` | ``cuda`` to this process's device. ``cuda`` without one raises RuntimeError."""
    if name not in ("auto", "cpu", "cuda"):
        raise HyMoError(f"training.device: found {name!r}, accepted: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise HyMoError("training.device: found cuda, but no CUDA device is visible; accepted here: auto, cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise HyMoError(f"local rank {local_rank()} has no GPU: {torch.cuda.device_count()} visible on this host")
    return torch.device("cuda", local_rank())


def init_distributed(device: str = "auto", timeout_s: float = FIRST_TIMEOUT_S) -> torch.device:
    """Join the job that torchrun started, if it did, and return this process's device.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_s: how long a collective may wait before its process ends with an error.
    """
    picked = pick_device(device)
    if picked.type == "cuda":
        torch.cuda.set_device(picked)
    if launched_by_torchrun() and not is_distributed():
        backend = "cpu:gloo,cuda:nccl" if picked.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout_s)
        store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=limit)))
        store.set_timeout(limit)
        fresh = fresh_store(store, rank, ranks, timeout_s)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=ranks, timeout=limit)
    return picked


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> dist.Store:
    """A part of torchrun's store that these processes alone write to.

    Its agent keeps one store over restarts, in which the keys of the processes before still stand: their addresses
    would be taken for those of living ones, and the job hang (pytorch/pytorch#135712). The restart count cannot tell
    them apart, each agent has its own. So rank 0 offers every rank a new name until that rank has taken it; by then all
    earlier processes have been stopped.
    """
    own = store.add(f"hymo/joined/{rank}", 1)  # which life of this rank it is
    if rank != 0:
        name = store.get(f"hymo/offer/{rank}/{own}").decode()  # waits for it
        store.set(f"hymo/taken/{rank}/{name}", "yes")
        return dist.PrefixStore(name, store)
    name, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    for other in range(1, ranks):
        offered = 0
        while not store.check([f"hymo/taken/{other}/{name}"]):
            joined = store.add(f"hymo/joined/{other}", 0)
            if joined > offered:
                store.set(f"hymo/offer/{other}/{joined}", name)
                offered = joined
            if time.monotonic() > until:
                raise HyMoError(f"rank {other} has not joined within {timeout_s:g} s")
            time.sleep(0.01)
    return dist.PrefixStore(name, store)


def ensure_group(device: torch.device) -> None:
    """Make a group of this one process where there is none, so that sharding needs no special case. No network."""
    if not is_distributed():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def build_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """The mesh [dp_replicate, dp_shard] over all ranks: ``replicas`` copies of the model, each in equal pieces.

    Ranks of one copy are neighbours, so that the frequent collectives stay inside a host.
    """
    size = world_size()
    if replicas < 1 or size % replicas:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        raise HyMoError(f"training.replicas: found {replicas}, accepted with {size} processes: {divisors}")
    return init_device_mesh(device_type, (replicas, size // replicas), mesh_dim_names=(REPLICATE, SHARD))


def new_gloo_group(timeout_s: float = FIRST_TIMEOUT_S) -> ProcessGroup | None:
    """A group of all ranks over gloo alone, for one background user (saves, the signal flag). A collective.

    Two users of one group would mix their messages up; None where there is one process without a group.
    """
    if not is_distributed():
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))  # type: ignore[return-value]


def set_timeout(timeout_s: float, mesh: DeviceMesh | None = None) -> None:
    """From now on a collective of the default group, or of a mesh's groups, fails after this long.

    Groups of their own, as that of background saves, keep theirs.
    """
    if not is_distributed():
        return
    module = dist.distributed_c10d
    change = getattr(module, "set_timeout", None) or module._set_pg_timeout  # torch < 2.14
    groups = [dist.group.WORLD, *(mesh.get_all_groups() if mesh is not None else ())]
    for group in groups:
        change(timedelta(seconds=timeout_s), group)


def shutdown() -> None:
    """Leave the job: destroy all groups (nothing to do on one process)."""
    if is_distributed():
        dist.destroy_process_group()
