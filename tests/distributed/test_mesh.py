from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hymo.distributed import mesh, reduce
from hymo.errors import HyMoError


def test_one_process_has_a_device_and_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert mesh.init_distributed("cpu") == torch.device("cpu")
    assert not reduce.is_distributed()
    assert mesh.new_gloo_group() is None
    mesh.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_without_a_gpu_is_an_error():
    with pytest.raises(HyMoError, match=r"training\.device: found cuda, but no CUDA device"):
        mesh.pick_device("cuda")
    assert mesh.pick_device("auto").type == "cpu"
    with pytest.raises(HyMoError, match="found 'tpu', accepted: auto, cpu, cuda"):
        mesh.pick_device("tpu")


def axes(replicas):
    grid = mesh.build_mesh("cpu", replicas)
    coordinate = grid.get_coordinate()
    return grid.mesh_dim_names, tuple(grid.shape), tuple(coordinate)


def test_the_mesh_has_named_axes_and_neighbours_share_a_copy(pool):
    names = (mesh.REPLICATE, mesh.SHARD)
    assert names == ("dp_replicate", "dp_shard")
    assert pool(4, axes, 1) == [(names, (1, 4), (0, r)) for r in range(4)]
    assert pool(4, axes, 2) == [(names, (2, 2), c) for c in ((0, 0), (0, 1), (1, 0), (1, 1))]
    with pytest.raises(AssertionError, match=r"training\.replicas: found 3, accepted with 4 processes: \[1, 2, 4\]"):
        pool(4, axes, 3)


def group_of_its_own():
    group = mesh.new_gloo_group(timeout_s=20)
    return reduce.gather_objects(reduce.rank(), group)


def test_a_background_user_gets_a_group_of_its_own(pool):
    assert pool(3, group_of_its_own) == [[0, 1, 2]] * 3


def one_process_group():
    return reduce.world_size()


def test_a_group_of_one_needs_no_network():
    """Sharding code runs alike at world size 1."""
    mesh.ensure_group(torch.device("cpu"))
    try:
        assert (reduce.is_distributed(), reduce.world_size()) == (True, 1)
        assert tuple(mesh.build_mesh("cpu").shape) == (1, 1)
        mesh.ensure_group(torch.device("cpu"))
    finally:
        mesh.shutdown()
    assert not reduce.is_distributed()


def join(store, ranks=3):
    """All ranks of one life of a job agree on a part of the store."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: mesh.fresh_store(store, rank, ranks, timeout_s=20), range(ranks)))


def test_a_restarted_job_does_not_read_what_the_one_before_wrote():
    """torchrun's agent keeps one store over restarts; a rank may also die before the others have joined."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    first = join(store)
    first[0].set("address", "old")
    assert first[2].get("address") == b"old"
    store.add("hymo/joined/2", 1)  # a second life of rank 2 alone, dead before rank 0 came
    second = join(store)
    assert not second[1].check(["address"])
    second[1].set("address", "new")
    assert second[0].get("address") == second[2].get("address") == b"new"
    assert first[0].get("address") == b"old"


def test_a_rank_that_never_joins_is_named():
    with pytest.raises(HyMoError, match=r"rank 1 has not joined within 0\.1 s"):
        mesh.fresh_store(dist.HashStore(), 0, 2, timeout_s=0.1)
