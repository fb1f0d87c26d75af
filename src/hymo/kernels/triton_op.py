"""The Triton kernels behind ``gated_recurrence(backend="triton")``."""

from torch import Tensor


def triton_recurrence(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    h0: Tensor | None,
    doc_ids: Tensor | None,
    max_log_decay: float | None,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("the Triton kernels are not built yet; pass backend='torch' (training.fused_gdn: false)")
