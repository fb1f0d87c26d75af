"""QK-clip: a head's logits shrink to the threshold, the others keep their bits."""

import torch
from torch import nn

from hymo.config import OptimizerConfig
from hymo.optim.build import build_optimizers
from hymo.optim.qk_clip import clip_heads, clip_qk

HEADS, NOPE, ROPE, V, RANK = 3, 4, 2, 5, 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.nope, self.rope, self.v_dim = NOPE, ROPE, V
        self.q_b = nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)


def logits(layer, q_latent, kv_latent, k_rope):
    q = layer.q_b(q_latent).unflatten(-1, (HEADS, NOPE + ROPE))
    k = layer.kv_b(kv_latent).unflatten(-1, (HEADS, NOPE + V))[..., :NOPE]
    k = torch.cat([k, k_rope[:, None].expand(-1, HEADS, -1)], -1)
    return torch.einsum("thd,shd->hts", q, k)


def test_logits_of_hot_heads_shrink_to_the_threshold():
    torch.manual_seed(0)
    layer = Attention().double()
    inputs = (torch.randn(7, RANK).double(), torch.randn(7, RANK).double(), torch.randn(7, ROPE).double())
    before = logits(layer, *inputs).detach()
    weights = [layer.q_b.weight.detach().clone(), layer.kv_b.weight.detach().clone()]
    maxima = before.amax((1, 2))
    threshold = float(maxima.median())
    clip_qk(nn.ModuleList([layer]), [maxima], threshold)
    after = logits(layer, *inputs).detach()
    factor = (threshold / maxima).clamp_max(1.0)
    torch.testing.assert_close(after, before * factor[:, None, None])
    assert float(after.amax((1, 2)).max()) <= threshold * (1 + 1e-12)
    values = slice(NOPE, None)
    for old, new in ((weights[1], layer.kv_b.weight.detach()),):
        assert torch.equal(old.unflatten(0, (HEADS, -1))[:, values], new.unflatten(0, (HEADS, -1))[:, values])


def test_cool_heads_keep_their_bits():
    torch.manual_seed(0)
    layer = Attention()
    before = [layer.q_b.weight.detach().clone(), layer.kv_b.weight.detach().clone()]
    clip_heads(
        layer.q_b.weight, layer.kv_b.weight, torch.tensor([5.0, 100.0, -3.0]), 100.0, nope=NOPE, rope=ROPE, v_dim=V
    )
    assert torch.equal(before[0], layer.q_b.weight)
    assert torch.equal(before[1], layer.kv_b.weight)


def test_full_precision_copies_are_clipped_and_keep_their_precision():
    torch.manual_seed(0)
    layer = Attention().bfloat16()
    optimizers = build_optimizers(nn.ModuleDict({"attn": layer}), OptimizerConfig(qk_clip=1.0))
    master = optimizers.state[layer.q_b.weight]["master"]
    master += 1e-5  # less than a unit of the half-precision weight
    before = master.clone()
    optimizers.clip_qk(layer, [torch.tensor([4.0, 0.5, 0.5])])
    rows = slice(0, NOPE + ROPE)
    torch.testing.assert_close(master[rows][:NOPE], before[rows][:NOPE] / 2)
    assert torch.equal(master[rows.stop :], before[rows.stop :])
    assert torch.equal(layer.q_b.weight.detach(), master.bfloat16())
