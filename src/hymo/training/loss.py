"""The pretraining loss: cross entropy of the next token, of the tokens beyond it (MTP), and the z-loss.

K: 1 + mtp_depth predictions of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hymo.models.model import ModelOutput


class Loss(Protocol):
    """What the trainer needs of a loss; a user's own takes this form."""

    def __call__(self, output: ModelOutput, valid_K: Tensor) -> tuple[Tensor, Tensor]:
        """(this micro-batch's share of the total loss, its share of each reported mean [K])."""


@dataclass(frozen=True)
class PretrainingLoss:
    """``sum_k w_k CE_k / valid_k + z_loss * sum(logsumexp^2) / valid_0`` with w_0 = 1.

    Each depth has its own denominator: its valid tokens of the whole attempt, over all micro-batches and ranks, at
    least 1. So the sum over micro-batches and ranks is the exact token mean however ragged they are, and a fully masked
    depth gives 0, not 0/0.
    """

    mtp_weights: Sequence[float] = ()
    z_loss: float = 0.0

    def __call__(self, output: ModelOutput, valid_K: Tensor) -> tuple[Tensor, Tensor]:
        denominators_K = valid_K.clamp(min=1).to(torch.float32)
        means_K = output.ce_sum_K / denominators_K
        weights_K = means_K.new_tensor([1.0, *self.mtp_weights])
        total = (weights_K * means_K).sum()
        if self.z_loss:
            total = total + self.z_loss * output.z_sum / denominators_K[0]
        return total, means_K.detach()
