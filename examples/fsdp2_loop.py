"""NorMuon under FSDP2: nothing changes but the wrapping. Run: torchrun --nproc-per-node 2 examples/fsdp2_loop.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hymo import NorMuon

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model)
matrices = [p for p in model[:4].parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
optimizer = NorMuon([{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 3e-3}], lr=0.02)

x = torch.randn(256, 16)
y = x.square().sum(1, keepdim=True).sqrt()
for step in range(100):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.set_factor(1 - step / 100)
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
