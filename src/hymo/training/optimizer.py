"""The optimizers under the path of the original design notes; the code is in ``hymo.optim``."""

from hymo.optim.build import Optimizers as Optimizers
from hymo.optim.build import build_optimizers as build_optimizers
from hymo.optim.cautious_adamw import CautiousAdamW as CautiousAdamW
from hymo.optim.normuon import NorMuon as NorMuon
from hymo.optim.orthogonalize import _newton_schulz_orthogonalize as _newton_schulz_orthogonalize

__all__ = ["CautiousAdamW", "NorMuon", "Optimizers", "_newton_schulz_orthogonalize", "build_optimizers"]
