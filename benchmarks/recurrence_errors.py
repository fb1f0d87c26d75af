"""Errors of the recurrence's providers against float64 over the grid of decays, at full size: no times.

    python benchmarks/recurrence_errors.py [--shape 4,4096,40,32,32] [--rates 0.001 1 40] [--providers triton]

Every head forgets at one rate, gates are sigmoid(N(0,1)). Of o and of each gradient: RMS error over RMS, of all numbers
and of the worst head (over its rows and tokens), and the largest error over the largest value. The reference is the
chunked form in float64. A head whose reference has a norm below 1e-6 is left out: all is forgotten there.
"""

import argparse

import torch
from torch import Tensor

from hymo.bench.recurrence import LEAF_BOUND, Case, check_providers, providers, sizes
from hymo.kernels.recurrence import gated_recurrence

NAMES = ("o", "dv", "db", "dc", "dg", "dA_log")
RATES = (1e-3, 1e-2, 0.1, 1.0, 4.0, 20.0, 40.0, 1e4)


def results(op, inputs: list[Tensor], do: Tensor) -> list[Tensor]:
    """o and the gradients of v, b, c, g, A_log."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = op(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]


def errors(x: Tensor, reference: Tensor, head_axis: int) -> tuple[float, float, float] | None:
    """Of all numbers, of the worst head, of the largest; infinite if x is not finite, None if nothing is left."""
    x, reference = (y.double().movedim(head_axis, 0).flatten(1) for y in (x, reference))
    if not x.isfinite().all():
        return (float("inf"),) * 3
    kept = reference.norm(dim=1) > 1e-6
    if not kept.any():
        return None
    x, reference = x[kept], reference[kept]
    off, size = (x - reference).norm(dim=1), reference.norm(dim=1)
    largest = (x - reference).abs().max() / reference.abs().max()
    return float(off.norm() / size.norm()), float((off / size).max()), float(largest)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    default = "4,4096,40,32,32" if cuda else "1,512,4,32,32"
    p.add_argument("--shape", type=sizes, default=sizes(default), metavar="B,T,H,D,S")
    p.add_argument("--rates", type=float, nargs="+", default=RATES)
    p.add_argument("--providers", default="triton,fla-chunk_gla" if cuda else "chunked")
    args = p.parse_args()
    names = args.providers.split(",")
    print(f"{Case(*args.shape, torch.bfloat16, 'cuda' if cuda else 'cpu')}")
    print("error of all / of the worst head / of the largest value, 1e-3")
    print(f"{'provider':24}{'rate':>7}" + "".join(f"{name:>20}" for name in NAMES))
    for rate in args.rates:
        for bound in (None, LEAF_BOUND):
            if bound is not None and rate > bound:
                continue
            case = Case(*args.shape, torch.bfloat16, "cuda" if cuda else "cpu", bound)
            check_providers(names, case)
            inputs = case.inputs()
            inputs[-1] = torch.full_like(inputs[-1], rate).log()
            do = torch.randn(inputs[0].shape, device=case.device, generator=torch.Generator(case.device).manual_seed(1))
            do = do.bfloat16()
            exact = results(
                lambda *xs: gated_recurrence(*xs, backend="torch"), [x.double() for x in inputs], do.double()
            )
            for name, op in providers(case).items():
                if name not in names or (bound is not None and name.startswith("fla")):
                    continue  # the peer knows no bound
                found = results(op, inputs, do)
                cells = [errors(x, y, 0 if n == "dA_log" else 2) for n, x, y in zip(NAMES, found, exact, strict=True)]
                texts = ["nothing left" if e is None else " / ".join(f"{1e3 * x:.1f}" for x in e) for e in cells]
                label = name + (", bounded" if bound else "")
                print(f"{label:24}{rate:7g}" + "".join(f"{text:>20}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
