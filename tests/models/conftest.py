"""A small model with every mechanism, and a packed batch for it."""

import pytest
import torch

from hymo.config import ModelConfig
from hymo.models.model import build_hymo

SMALL = {
    "dim": 32, "n_layers": 4, "vocab_size": 61, "mla_every": 2, "n_routed": 4, "top_k": 2, "d_ff": 24,
    "gdn_heads": 2, "gdn_head_dim": 16, "gdn_state_dim": 8, "mtp_depth": 2, "mtp_weights": (0.3, 0.1),
    "mla_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_head_dim": 12,
}  # fmt: skip


@pytest.fixture(scope="session")
def small_config():
    """make(**changes) -> ModelConfig."""
    return lambda **changes: ModelConfig(**(SMALL | changes))


@pytest.fixture
def small_model(small_config):
    """make(**changes) -> a model with matrices large enough that every path matters, in evaluation mode."""

    def make(**changes):
        model = build_hymo(small_config(**changes), seed=1)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.dim() >= 2 and "A_log" not in name:
                    param.mul_(10 if param.std() < 0.1 else 1)
                if name.endswith("norm.weight"):
                    param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3)))
        return model.eval()

    return make


@pytest.fixture(scope="session")
def packed_batch():
    """make(batch, length, depth) -> tokens_BL, doc_ids_BL, labels_KBT with several documents a row."""

    def make(batch=3, length=24, depth=2, seed=0):
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(61, (batch, length + depth + 1), generator=g)
        starts = torch.rand(batch, length + depth + 1, generator=g) < 0.15
        doc_ids = starts.cumsum(1).to(torch.int32)
        labels = torch.stack(
            [
                torch.where(
                    doc_ids[:, k + 1 : k + 1 + length] == doc_ids[:, :length], tokens[:, k + 1 : k + 1 + length], -100
                )
                for k in range(depth + 1)
            ]
        )
        return tokens[:, : length + depth], doc_ids[:, : length + depth], labels

    return make
