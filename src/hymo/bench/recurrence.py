"""``hymo bench recurrence``: providers of the recurrence side by side, with the error against float64 beside each time.

Each provider is checked before it is timed, on a shorter sequence of the same distribution, against the loop in
float64 (RMS error over RMS). Times are medians with a cold cache, on CUDA of a recorded CUDA graph: what the GPU takes.
"called" is forward and backward as called from Python, where the host's launches may take longer than the GPU does.
"first" is the first call, compilation and tuning included; "extra" is the memory that a forward and backward pass takes
beyond the inputs. "limit" is the share of the time that moving the least possible bytes takes at the machine's copy
speed: each input read once and each output written once.

``--tune`` times other launches of the Triton kernels beside the shipped ones; each is checked first.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo.bench.recurrence_cases import relative_error
from hymo.cli_tools import add_examples
from hymo.errors import HyMoError
from hymo.kernels.recurrence import Backend, gated_recurrence

Op = Callable[..., Tensor]
CHECK_TOKENS = 256
LEAF_BOUND = 5.0
NOT_THE_RECURRENCE = ("sdpa-causal",)  # timed for its speed at the same sizes; it computes something else


@dataclass(frozen=True)
class Case:
    """One problem: sizes, the dtype of v, b, c, and the bound on a step's log-decay (None: any decay)."""

    B: int
    T: int
    H: int
    D: int
    S: int
    dtype: torch.dtype
    device: str
    max_log_decay: float | None = None

    def bytes_forward(self) -> int:
        """v, b, c, g read once, o written once."""
        tokens = self.B * self.T * self.H
        return tokens * ((2 * self.D + 2 * self.S) * self.dtype.itemsize + 4)

    def bytes_both(self) -> int:
        """Those, and in the backward pass v, b, c, g, do read and dv, db, dc, dg written."""
        tokens = self.B * self.T * self.H
        return self.bytes_forward() + tokens * ((3 * self.D + 4 * self.S) * self.dtype.itemsize + 8)

    def inputs(self, T: int | None = None) -> list[Tensor]:
        """v, b, c, g, A_log. Bounded: rates log-uniform in [0.25, 4]; unbounded: head h forgets at rate h."""
        generator = torch.Generator(self.device).manual_seed(0)
        B, T, H = self.B, T or self.T, self.H

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, generator=generator)

        v, b, c = normal(B, T, H, self.D), normal(B, T, H, self.S) / self.S**0.5, normal(B, T, H, self.S)
        if self.max_log_decay is None:
            A_log = torch.arange(1, H + 1, device=self.device).float().log()[:, None].expand(H, self.S).contiguous()
        else:
            A_log = torch.empty(H, self.S, device=self.device).uniform_(-1.386, 1.386, generator=generator)
        return [*(x.to(self.dtype) for x in (v, b, c)), normal(B, T, H).sigmoid(), A_log]


@dataclass(frozen=True)
class Row:
    """What one provider did on one case; an error message instead of numbers if it could not."""

    provider: str
    error: float = float("nan")
    gradient_error: float = float("nan")
    first_s: float = float("nan")
    forward_ms: float = float("nan")
    both_ms: float = float("nan")
    called_ms: float = float("nan")
    extra_mib: float = float("nan")
    failure: str = ""


def providers(case: Case) -> dict[str, Op]:
    """Name -> function of (v, b, c, g, A_log) on this case's device."""

    def ours(backend: Backend) -> Op:
        return lambda *xs: gated_recurrence(*xs, max_log_decay=case.max_log_decay, backend=backend)

    found = {"loop": ours("loop"), "chunked": ours("torch")}
    if case.device == "cuda":
        found |= {"chunked-compiled": torch.compile(ours("torch")), "triton": ours("triton"), "sdpa-causal": _attention}
        try:
            from fla.ops.gla import chunk_gla
        except Exception:  # not installed, or it fails to import with this Triton
            return found

        def fla(v: Tensor, b: Tensor, c: Tensor, g: Tensor, A_log: Tensor) -> Tensor:
            return chunk_gla(c, b, v, -g[..., None] * A_log.exp(), scale=1.0)[0]

        found["fla-chunk_gla"] = fla
    return found


def _attention(v: Tensor, b: Tensor, c: Tensor, g: Tensor, A_log: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (c, b, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def recorded(function: Callable[[], object]) -> Callable[[], object]:
    """``function`` as a CUDA graph that repeats what it launches; itself, with a line that says so, if it cannot be."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled, tuned or allocated once must be so before
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as reason:
        print(f"timed as called, no CUDA graph: {str(reason).splitlines()[0][:90]}", flush=True)
        return function
    return graph.replay


def measure(function: Callable[[], object], device: str, seconds: float = 1.0) -> float:
    """Median milliseconds: events on CUDA, the wall clock elsewhere; the first calls are not counted."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=50, rep=200, return_mode="median")
    for _ in range(3):
        function()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 50):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def check(function: Op, case: Case) -> tuple[float, float, float]:
    """Error of the output, the largest error of a gradient, against the loop in float64; seconds of the first call."""
    inputs = case.inputs(min(case.T, CHECK_TOKENS))
    results = []
    seconds = []
    for op, leaves in (
        (function, [x.clone().requires_grad_() for x in inputs]),
        (lambda *xs: gated_recurrence(*xs, backend="loop"), [x.double().requires_grad_() for x in inputs]),
    ):
        start = time.perf_counter()
        o = op(*leaves)
        generator = torch.Generator(case.device).manual_seed(1)
        do = torch.randn(o.shape, device=case.device, generator=generator).to(case.dtype).to(o.dtype)
        gradients = torch.autograd.grad(o, leaves, do, allow_unused=True)
        results.append((o, *(torch.zeros_like(x) if y is None else y for x, y in zip(leaves, gradients, strict=True))))
        results[-1][1].sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    errors = [relative_error(x, reference) for x, reference in zip(*results, strict=True)]
    return errors[0], max(errors[1:]), seconds[0]


def time_op(function: Op, case: Case) -> tuple[float, float, float, float]:
    """Milliseconds of a forward pass, of forward and backward, of the latter as called; MiB of it beyond the inputs."""
    leaves = [x.requires_grad_() for x in case.inputs()]
    do = torch.randn_like(leaves[0])

    def both() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(function(*leaves), leaves, do, allow_unused=True)

    if case.device != "cuda":
        with torch.no_grad():
            forward_ms = measure(lambda: function(*leaves), case.device)
        return forward_ms, measure(both, case.device), float("nan"), float("nan")
    with torch.no_grad():
        forward_ms = measure(recorded(lambda: function(*leaves)), case.device)
    both_ms = measure(recorded(both), case.device)
    called_ms = measure(both, case.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    return forward_ms, both_ms, called_ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def run_one(name: str, function: Op, case: Case) -> Row:
    """Check, then time; what goes wrong becomes the row's message."""
    try:
        error, gradient_error, first_s = check(function, case)
        if name in NOT_THE_RECURRENCE:
            error = gradient_error = float("nan")
        return Row(name, error, gradient_error, first_s, *time_op(function, case))
    except Exception as failure:
        return Row(name, failure=f"{type(failure).__name__}: {failure}".splitlines()[0][:90])


def run_case(case: Case, names: Sequence[str] = ()) -> list[Row]:
    """The named providers (all, if none is named)."""
    return [run_one(name, op, case) for name, op in providers(case).items() if not names or name in names]


@contextmanager
def launching(key: str, **changes: int | None) -> Iterator[None]:
    """Another launch of one Triton kernel for a while."""
    from hymo.kernels.triton_common import LAUNCHES

    shipped = LAUNCHES[key]
    LAUNCHES[key] = dataclasses.replace(shipped, **changes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        LAUNCHES[key] = shipped


def tune(case: Case) -> list[Row]:
    """Other launches of each kernel, one change at a time, best read against the first row."""
    from hymo.kernels.triton_op import form_of

    op = providers(case)["triton"]
    form = form_of(case.dtype, case.max_log_decay)
    rows = [run_one("shipped", op, case)]
    for kernel in ("segment", f"forward {form}", f"backward {form}"):
        for stages in (2, 3, 4):
            for registers, programs in ((None, 8), (168, 12), (128, 16)):
                with launching(kernel, stages=stages, registers=registers, programs=programs):
                    rows.append(run_one(f"{kernel} {stages} {registers}", op, case))
    return rows


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy (reads and writes counted): the machine's limit for work that only moves data."""
    x = torch.randn((1 << 28) if device == "cuda" else (1 << 23), device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / measure(lambda: y.copy_(x), device, seconds=0.3) * 1e3


def table(case: Case, rows: Sequence[Row], bandwidth: float) -> str:
    """The rows as aligned text: errors, milliseconds, bytes a second, and the byte limit as a share of the time."""
    form = "any decay" if case.max_log_decay is None else f"log-decay <= {case.max_log_decay:g} a step"
    head = f"B{case.B} T{case.T} H{case.H} D{case.D} S{case.S} {str(case.dtype)[6:]} on {case.device}, {form}"
    titles = f"{'provider':18}{'o err':>9}{'grad err':>9}{'first s':>9}"
    titles += "".join(f"{name:>10}{'GB/s':>7}{'limit':>7}" for name in ("fwd ms", "f+b ms"))
    titles += f"{'called':>10}{'extra MiB':>11}" if case.device == "cuda" else ""
    lines = [f"{head}; copy {bandwidth / 1e9:.0f} GB/s", titles]
    for row in rows:
        if row.failure:
            lines.append(f"{row.provider:18}{row.failure}")
            continue
        line = f"{row.provider:18}{row.error:9.1e}{row.gradient_error:9.1e}{row.first_s:9.1f}"
        for ms, n in ((row.forward_ms, case.bytes_forward()), (row.both_ms, case.bytes_both())):
            line += f"{ms:10.3f}{n / ms / 1e6:7.0f}{n / bandwidth / ms * 1e3:7.0%}"
        lines.append(line + (f"{row.called_ms:10.3f}{row.extra_mib:11.0f}" if case.device == "cuda" else ""))
    return "\n".join(lines)


def build_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this benchmark's options."""
    cuda = torch.cuda.is_available()
    default = ["4,4096,40,32,32"] if cuda else ["1,1024,8,32,32"]
    parser.add_argument(
        "--shape", nargs="+", type=sizes, default=[sizes(text) for text in default], metavar="B,T,H,D,S",
        help="one or more problems",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="bfloat16" if cuda else "float32", choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--providers", default="", help="names, comma-separated; all that are installed by default")
    parser.add_argument("--tune", action="store_true", help="time other launches of the Triton kernels")
    return parser


def sizes(text: str) -> tuple[int, int, int, int, int]:
    """B,T,H,D,S of the command line."""
    numbers = [int(n) if n.strip().isdigit() else 0 for n in text.split(",")]
    if len(numbers) != 5 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"found {text}; accepted: five positive numbers B,T,H,D,S")
    B, T, H, D, S = numbers
    return B, T, H, D, S


def check_providers(names: Sequence[str], case: Case) -> None:
    """Raise HyMoError for a provider that there is not."""
    known = list(providers(case))
    if missing := [name for name in names if name not in known]:
        raise HyMoError(f"--providers: found {', '.join(missing)}; accepted here: {', '.join(known)}")


def run(args: argparse.Namespace) -> int:
    """Print, for every shape, one table for any decay and one for a bounded decay."""
    names = [name for name in args.providers.split(",") if name]
    bandwidth = copy_bandwidth(args.device)
    for B, T, H, D, S in args.shape:
        for bound in (None, LEAF_BOUND):
            case = Case(B, T, H, D, S, getattr(torch, args.dtype), args.device, bound)
            check_providers(names, case)
            rows = tune(case) if args.tune else run_case(case, names)
            print(table(case, rows, bandwidth), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    own = argparse.ArgumentParser(
        "hymo bench recurrence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser = build_parser(own)
    add_examples(parser, "bench recurrence")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
