"""How near each orthogonalizer comes to the polar factor: the table of docs/optimizers.md.

    OMP_NUM_THREADS=1 python benchmarks/orthogonalizers.py [--seeds 3] [--device cpu]

Relative Frobenius error of `hymo.optim.orthogonalize.orthogonalize` with its matrix products in float32, and in
brackets in bfloat16. Gaussian matrices have independent N(0,1) elements and are compared with the float64 singular
value decomposition; the power law is U diag(1, 1/2, ..., 1/n) V^T with random orthogonal U and V, whose polar factor
is U V^T. A cell is the least and the largest of the seeds, one number where both print alike.
"""

import argparse
import time

import torch
from torch import Tensor

from hymo.optim.orthogonalize import get_orthogonalizer, orthogonalize

METHODS = (
    ("cubic", 5),
    ("cubic", 10),
    ("cubic", 20),
    ("quintic", 5),
    ("you", 5),
    ("polar_express", 5),
    ("polar_express", 8),
    ("deepseek_v4", 10),
)
MATRICES = (("Gaussian", 896, 224), ("Gaussian", 2048, 2048), ("power law", 2048, 2048))


def matrix_and_polar_factor(kind: str, m: int, n: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """A matrix [m, n] in float32 and its polar factor in float64."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    if kind == "Gaussian":
        g = gaussian(m, n).float()
        u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
        return g, u @ vh
    rank = min(m, n)
    u, v = (torch.linalg.qr(gaussian(size, rank))[0] for size in (m, n))
    values = 1.0 / torch.arange(1, rank + 1, dtype=torch.float64, device=device)
    return ((u * values) @ v.mT).float(), u @ v.mT


def errors(g: Tensor, polar: Tensor, dtype: str) -> list[float]:
    """Relative error of each of METHODS on one matrix."""
    found = (orthogonalize(g, get_orthogonalizer(name, steps, dtype)).double() for name, steps in METHODS)
    return [float((o - polar).norm() / polar.norm()) for o in found]


def cell(values: list[float]) -> str:
    least, largest = (f"{x:.3f}" if x >= 0.01 else f"{x:.1e}" for x in (min(values), max(values)))
    return least if least == largest else f"{least} to {largest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}, seeds 0 to {args.seeds - 1}", flush=True)
    columns = []
    for kind, m, n in MATRICES:
        start, found = time.perf_counter(), {"float32": [], "bfloat16": []}
        for seed in range(args.seeds):
            g, polar = matrix_and_polar_factor(kind, m, n, seed, args.device)
            for dtype, runs in found.items():
                runs.append(errors(g, polar, dtype))
        columns.append([[cell(list(x)) for x in zip(*runs, strict=True)] for runs in found.values()])
        print(f"{kind} {m} x {n}: {time.perf_counter() - start:.0f} s", flush=True)
    print("| method, steps | " + " | ".join(f"{kind} {m} x {n}" for kind, m, n in MATRICES) + " |")
    print("|---" * (1 + len(MATRICES)) + "|")
    for row, (name, steps) in enumerate(METHODS):
        cells = (f"{wide[row]} [{half[row]}]" for wide, half in columns)
        print(f"| `{name}`, {steps} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
