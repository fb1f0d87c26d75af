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

    def term_weights(self, valid_K: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the sums ``ce_sum_K`` and ``z_sum`` in the loss: the head wants them before its backward."""
        denominators_K = valid_K.clamp(min=1).to(torch.float32)
        # filled in on the device: a tensor of the numbers would be a copy from the host in every micro-batch
        weights_K = torch.stack([denominators_K.new_full((), weight) for weight in (1.0, *self.mtp_weights)])
        return weights_K / denominators_K, self.z_loss / denominators_K[0]

    def __call__(self, output: ModelOutput, valid_K: Tensor) -> tuple[Tensor, Tensor]:
        weights_K, z_weight = self.term_weights(valid_K)
        total = (weights_K * output.ce_sum_K).sum()
        if self.z_loss:
            total = total + z_weight * output.z_sum
        return total, output.ce_sum_K.detach() / valid_K.clamp(min=1)
