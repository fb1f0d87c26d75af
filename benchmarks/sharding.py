"""Sharding on real devices: is it one process's gradient, and what do saves and the small collectives cost?

torchrun --nproc-per-node 2 benchmarks/sharding.py            (on GPUs, hymo_750m for the times)
torchrun --nproc-per-node 2 benchmarks/sharding.py --device cpu --model tiny
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor

from hymo.checkpoint import store
from hymo.checkpoint.saver import Saver
from hymo.config import ModelConfig
from hymo.config_io import load_config
from hymo.distributed import fsdp, mesh, reduce
from hymo.models.model import build_hymo
from hymo.optim.build import build_optimizers

SMALL = ModelConfig(
    dim=64, n_layers=4, vocab_size=257, mla_every=2, gdn_heads=4, gdn_head_dim=16, gdn_state_dim=16, mla_heads=2,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_dim=16, qk_rope_dim=16, v_head_dim=16, n_routed=4, n_shared=1, top_k=2,
    d_ff=32, mtp_depth=1, mtp_weights=(0.3,),
)  # fmt: skip
VARIANTS = [
    {"reshard": "layer"}, {"reshard": "step"}, {"reshard": "never"}, {"reduce_each_micro_batch": False},
    {"replicas": 2}, {"fsdp_mixed_precision": "bfloat16"},
]  # fmt: skip


def say(*words: object) -> None:
    if reduce.is_main():
        print(*words, flush=True)


def settings(device: torch.device, **changes: object) -> SimpleNamespace:
    values = {
        "fsdp_mixed_precision": "float32", "moe_mixed_precision": True, "seed": 3, "device": device.type,
        "reshard": "layer", "reduce_each_micro_batch": True, "replicas": 1,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def attempt(model, device: torch.device, size: int, me: int, micro_batches: int = 2, length: int = 64) -> torch.Tensor:
    """Gradients of 8 sequences with ragged labels, dealt to ``size`` ranks; this rank's share of the loss."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SMALL.vocab_size, (8, length + 2), generator=g)
    labels = torch.stack([tokens[:, 1 : length + 1], tokens[:, 2 : length + 2]])
    labels[:, 1::2, 20:] = -100
    weights = (torch.tensor([1.0, 0.3]) / (labels >= 0).sum((1, 2))).to(device)
    mine = torch.arange(8).chunk(size)[me].chunk(micro_batches)
    total = torch.zeros((), device=device)
    for k, rows in enumerate(mine):
        fsdp.begin_micro_batch(model, is_last=k == len(mine) - 1)
        output = model(tokens[rows, : length + 1].to(device), labels_KBT=labels[:, rows].to(device))
        loss = (output.ce_sum_K * weights).sum()
        (loss * size).backward()
        total += loss.detach()
    return total


def compare(device: torch.device) -> None:
    alone = build_hymo(SMALL, device=device, seed=3)
    right_loss = attempt(alone, device, 1, 0)
    right = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten() for g in right.values()]).norm()
    for changes in VARIANTS:
        if reduce.world_size() % int(changes.get("replicas", 1)):
            continue
        model = fsdp.wrap_model_with_fsdp(build_hymo(SMALL, device="meta"), settings(device, **changes))
        loss = reduce.sum_across(attempt(model, device, reduce.world_size(), reduce.rank()))
        reduce.mean_replicated_gradients(model.parameters())
        found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        worst = max(float((found[n] - g).norm() / torch.maximum(g.norm(), 1e-3 * norm)) for n, g in right.items())
        say(f"{changes}: loss {abs(float(loss / right_loss) - 1):.1e}, worst gradient {worst:.1e}")


def timed(device: torch.device, work) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    reduce.barrier()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def saves(device: torch.device, name: str) -> None:
    config = load_config(name)
    model = fsdp.wrap_model_with_fsdp(build_hymo(config, device="meta"), config)
    optimizers = build_optimizers(model, config.optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizers.named_state()}
    run = Path(reduce.broadcast_object(tempfile.mkdtemp(prefix="sharding-")))
    saver = Saver(run, asynchronous=True)
    for step in (1, 2, 3):
        stall = timed(device, lambda step=step: saver.save(step, step, state, {}))
        say(f"save {step}: training waits {stall:.2f} s, written after {timed(device, saver.wait):.1f} s more")
    path = saver.outcomes()[-1]
    assert isinstance(path, Path), path
    size = sum(file["size"] for file in store.read_manifest(path).files.values())
    checked = timed(device, lambda: store.load(path, state))
    plain = timed(device, lambda: store.load(path, state, hashes=False))
    say(f"{size / 1e9:.2f} GB: loaded in {checked:.1f} s, without hashes in {plain:.1f} s")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    parameters, loss = list(model.parameters()), torch.ones((), device=device)
    reduce.verdict(loss, parameters)
    verdict = min(timed(device, lambda: reduce.verdict(loss, parameters)) for _ in range(5))
    mean = min(timed(device, lambda: reduce.mean_replicated_gradients(parameters)) for _ in range(5))
    say(f"verdict {verdict * 1e3:.1f} ms, mean of the replicated gradients {mean * 1e3:.2f} ms")
    reduce.barrier()
    if reduce.is_main():
        shutil.rmtree(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="hymo_750m", help="configuration for the times")
    arguments = parser.parse_args()
    device = mesh.init_distributed(arguments.device)
    mesh.ensure_group(device)
    say(f"{reduce.world_size()} processes, {device.type}, torch {torch.__version__}")
    compare(device)
    saves(device, arguments.model)
    mesh.shutdown()


if __name__ == "__main__":
    main()
