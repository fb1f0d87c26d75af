"""Checkpoints of several processes: written by all, read by any number, the same numbers."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from hymo.checkpoint import manifest, store
from hymo.checkpoint.saver import Saver
from hymo.checkpoint.store import CheckpointError, latest_on_all_ranks, load, prove_shared, save
from hymo.config import ModelConfig, OptimizerConfig
from hymo.distributed import reduce
from hymo.distributed.fsdp import wrap_model_with_fsdp
from hymo.models.model import build_hymo
from hymo.optim.build import build_optimizers

CONFIG = ModelConfig(
    dim=16, n_layers=2, vocab_size=17, mla_every=2, gdn_heads=2, gdn_head_dim=4, gdn_state_dim=4, mla_heads=2,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_dim=4, qk_rope_dim=4, v_head_dim=4, n_routed=4, n_shared=1, top_k=2, d_ff=12,
    mtp_depth=1, mtp_weights=(0.3,),
)  # fmt: skip
OPTIMIZER = OptimizerConfig(experts="muon")
TRAINING = SimpleNamespace(
    fsdp_mixed_precision="float32", moe_mixed_precision=True, seed=0, device="cpu", reshard="layer", replicas=1,
    reduce_each_micro_batch=True,
)  # fmt: skip


def build(seed=0):
    training = SimpleNamespace(**vars(TRAINING) | {"seed": seed})
    model = wrap_model_with_fsdp(build_hymo(CONFIG, device="meta"), training)
    return model, build_optimizers(model, OPTIMIZER)


def train(model, optimizers, steps, first):
    """Some updates on 12 fixed sequences dealt to the ranks; returns the losses summed over them."""
    losses = []
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, CONFIG.vocab_size, (12, 10), generator=g)
        mine = tokens.chunk(reduce.world_size())[reduce.rank()]
        labels = torch.stack([mine[:, 1:9], mine[:, 2:10]])
        ce = model(mine[:, :9], labels_KBT=labels).ce_sum_K
        loss = (ce * torch.tensor([1.0, 0.3])).sum() / (12 * 8)
        (loss * reduce.world_size()).backward()
        reduce.mean_replicated_gradients(model.parameters())
        optimizers.step()
        optimizers.zero_grad(set_to_none=True)
        losses.append(reduce.sum_across(loss.detach()).item())
    return losses


def state_of(model, optimizers):
    return {"model": model.state_dict(), "optimizer": optimizers.named_state()}


def whole(state):
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in store.flatten(state).items()}


def write(run, asynchronous):
    model, optimizers = build()
    losses = train(model, optimizers, 2, first=0)
    if asynchronous:
        saver = Saver(Path(run), asynchronous=True)
        saver.save(2, 2, state_of(model, optimizers), {"losses": losses})
        later = train(model, optimizers, 3, first=2)  # goes on while the save is written
        assert saver.wait(60)
        path = saver.outcomes()[0]
    else:
        path = save(run, 2, 2, state_of(model, optimizers), {"losses": losses})
        later = train(model, optimizers, 3, first=2)
    return str(path), later


def read(run):
    """Load into a model that started elsewhere; the whole state, and the losses of the steps that follow."""
    model, optimizers = build(seed=9)
    path = latest_on_all_ranks(run)
    record = load(path, state_of(model, optimizers))
    full = whole(state_of(model, optimizers))
    return record.world_size, full, train(model, optimizers, 3, first=2)


def test_a_checkpoint_moves_from_4_to_2_to_3_to_1_processes(pool, tmp_path):
    """Uneven rows (17 words), experts cut on either axis, momentum and second moments: equal in every world.

    A vocabulary that the ranks do not divide resumed to a worse loss elsewhere (pytorch/torchtitan#1136).
    """
    written, later = pool(4, write, str(tmp_path), False)[0]
    files = sorted(p.name for p in Path(written).glob("*.distcp"))
    assert files == [f"__{r}_0.distcp" for r in range(4)]
    results = {n: pool(n, read, str(tmp_path)) for n in (4, 2, 3, 1)}
    world, right, losses = results[1][0]
    assert world == 4
    assert losses == pytest.approx(later, rel=1e-5)
    assert results[4][0][2] == later, "bitwise at the same world size"
    for n, per_rank in results.items():
        for _, full, after in per_rank:
            assert full.keys() == right.keys()
            assert all(torch.equal(full[k], right[k]) for k in right), n
            assert after == pytest.approx(later, rel=1e-5)


def test_an_asynchronous_save_of_several_processes_holds_its_step(pool, tmp_path):
    """Written while three more updates were made: it resumes to the same losses as they had."""
    _, later = pool(2, write, str(tmp_path), True)[0]
    assert pool(2, read, str(tmp_path))[0][2] == later


def test_one_process_reads_a_sharded_model_alone(pool, tmp_path):
    """As evaluation and generation do: plain tensors, no group, the weights only."""
    written, _ = pool(3, write, str(tmp_path), False)[0]
    model = build_hymo(CONFIG, seed=5)
    load(written, {"model": model.state_dict()}, only=("model",))
    _, right, _ = pool(1, read, str(tmp_path))[0]
    assert all(torch.equal(t, right[f"model.{k}"]) for k, t in model.state_dict().items())


# --- errors on one rank are errors on all ---


def disk_full_on(run, bad):
    state = {"w": torch.ones(4)}
    model, _ = build()
    state["model"] = model.state_dict()
    save(run, 1, 1, state, {})
    real = os.fsync

    def fsync(handle):
        if reduce.rank() == bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    os.fsync = fsync
    try:
        save(run, 2, 2, state, {})
    except CheckpointError as error:
        said = str(error)
    finally:
        os.fsync = real
    reduce.barrier()
    left = sorted(p.name for p in (Path(run) / "checkpoints").iterdir())
    reduce.barrier()
    return said, left, save(run, 2, 2, state, {}).name


@pytest.mark.parametrize("bad", [0, 2])
def test_a_disk_that_is_full_on_one_rank(pool, tmp_path, bad):
    for said, left, again in pool(3, disk_full_on, str(tmp_path), bad):
        assert "No space left" in said
        assert left == ["step-1"]
        assert again == "step-2"


def damaged(run):
    model, _ = build()
    path = save(run, 1, 1, {"model": model.state_dict()}, {})
    newer = save(run, 2, 2, {"model": model.state_dict()}, {})
    if reduce.is_main():
        file = newer / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    reduce.barrier()
    try:
        load(newer, {"model": model.state_dict()})
    except CheckpointError as error:
        return str(error), error.alternative == path
    return "loaded", False


def test_damage_is_found_by_whichever_rank_looks_and_raised_on_all(pool, tmp_path):
    for said, offered in pool(3, damaged, str(tmp_path)):
        assert "__1_0.distcp has another SHA-256" in said
        assert offered


def unreadable(run, bad):
    """Rank ``bad`` may not read the file that it is to hash, then not the folder of checkpoints."""
    path, said = save(run, 1, 1, {"w": torch.ones(4)}, {}), []

    def refuse(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    for owner, name, call in [
        (manifest, "sha256", lambda: load(path, {"w": torch.ones(4)})),
        (Path, "iterdir", lambda: latest_on_all_ranks(run)),
    ]:
        real = getattr(owner, name)
        if reduce.rank() == bad:
            setattr(owner, name, refuse)
        try:
            call()
        except CheckpointError as error:
            said.append(str(error))
        finally:
            setattr(owner, name, real)
        reduce.barrier()
    return said


def test_what_one_rank_may_not_read_is_an_error_of_all(pool, tmp_path):
    """No rank is left waiting for one that has raised by itself."""
    said = pool(2, unreadable, str(tmp_path), 0)
    assert said[0] == said[1]
    file, folder = said[0]
    assert "step-1 is damaged: .metadata cannot be read (Permission denied); __1_0.distcp cannot be read" in file
    assert folder.endswith("checkpoints cannot be read (Permission denied)")


def separate_folders(run):
    mine = Path(run) / str(min(reduce.rank(), 1))
    mine.mkdir(exist_ok=True)
    try:
        prove_shared(mine, patience_s=0.3)
    except CheckpointError as error:
        return str(error)
    return "shared"


def one_folder(run):
    prove_shared(run)
    reduce.barrier()
    return sorted(p.name for p in Path(run).iterdir())


def test_a_folder_that_is_not_shared_is_found_before_the_first_step(pool, tmp_path):
    (tmp_path / "x").mkdir()
    said = pool(3, separate_folders, str(tmp_path / "x"))
    assert all("not the same folder for rank 1 on" in text and "rank 2 on" in text for text in said)
    assert pool(3, one_folder, str(tmp_path / "y")) == [[]] * 3


def newest(run):
    """Rank 1 sees a folder that rank 0 does not: all take rank 0's answer, never each its own newest."""
    folder = Path(run) if reduce.rank() == 0 else Path(run) / "elsewhere"
    return str(latest_on_all_ranks(folder))


def test_all_ranks_take_the_same_newest(pool, tmp_path):
    path = save(tmp_path, 3, 3, {"w": torch.ones(2)}, {})
    assert pool(2, newest, str(tmp_path)) == [str(path)] * 2
