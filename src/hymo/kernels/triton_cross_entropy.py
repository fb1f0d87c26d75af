"""Cross entropy of a chunk of logits and its gradient as one Triton kernel, in the logits' own memory.

A program is one token: it reads its row of logits twice, the second time from the GPU's cache, and writes the gradient
over it. Sums are fp32. ``hymo.kernels.cross_entropy._chunk_terms`` is the same in PyTorch.

Letters: C tokens of the chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymo.kernels.triton_common import LOG2E
from hymo.kernels.triton_launch import launch

BLOCK = 4096
OPTIONS = {"num_warps": 8}


@triton.jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, weight_ptr, z_weight_ptr, ce_ptr, z_ptr, V,
    IGNORE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ce and z = lse^2 of each token, zero where its label is IGNORE; with GRADIENT the logits become
    d(weight * ce + z_weight * z) / d logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    label = tl.load(labels_ptr + row)
    at = tl.arange(0, BLOCK)
    # Each lane keeps a maximum and a sum of its own; they are joined after the row.
    top, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + at, mask=start + at < V, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, x)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.exp2(x - base)
        top = higher
    highest = tl.max(top, 0)
    lse2 = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))  # to the base of two
    lse = lse2 / LOG2E
    valid = label != IGNORE
    picked = tl.load(logits_ptr + tl.where(valid, label, 0)).to(tl.float32)
    tl.store(ce_ptr + row, tl.where(valid, lse - picked, 0.0))
    tl.store(z_ptr + row, tl.where(valid, lse * lse, 0.0))
    if GRADIENT:
        weight = tl.load(weight_ptr)
        scale = weight + 2.0 * tl.load(z_weight_ptr) * lse
        tl.debug_barrier()  # the label's logit has been read by all
        for start in range(0, V, BLOCK):
            inside = start + at < V
            x = tl.load(logits_ptr + start + at, mask=inside, other=0.0).to(tl.float32) * LOG2E
            gradient = tl.exp2(x - lse2) * scale - tl.where(start + at == label, weight, 0.0)
            gradient = tl.where(valid, gradient, 0.0)
            tl.store(logits_ptr + start + at, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def chunk_terms(
    logits_CV: Tensor, labels_C: Tensor, weight: Tensor, z_weight: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``hymo.kernels.cross_entropy._chunk_terms``: sums of ce and lse^2, and the gradient in the logits' place."""
    C, V = logits_CV.shape
    ce_C, z_C = torch.empty(2, C, dtype=torch.float32, device=logits_CV.device)
    constants = {"IGNORE": -100, "GRADIENT": needs_grad, "BLOCK": min(BLOCK, triton.next_power_of_2(V))}
    args = (logits_CV, labels_C, weight, z_weight, ce_C, z_C, V)
    launch(cross_entropy_kernel, (C, 1), args, constants, OPTIONS)
    return ce_C.sum(), z_C.sum(), logits_CV
