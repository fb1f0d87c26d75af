"""Generation by length of context, one text: seconds to read a prompt, tokens a second after it, bytes of the cache.

    python benchmarks/generation.py --out DIR [--contexts 1024 16384 131072] [--tokens 64]
    python benchmarks/generation.py --out DIR --table --picture docs/images/generation.png

Weights are random: speed and memory do not depend on them. A prompt of each length is read twice and the second time
counts (kernels are there by then); then tokens are chosen greedily, the first few uncounted. The cache is told apart
into recurrent layers, whose state has one size at every length, and attention layers, which keep a latent a token.
DIR/generation.json is written after each length. The picture needs matplotlib (extra `report`).
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from variants import parse, write

from hymo.config_io import load_config
from hymo.distributed.mesh import pick_device
from hymo.models.gdn import GDNState
from hymo.models.model import Cache, HyMo, build_hymo
from hymo.observe.units import size
from hymo.training.flags import thread_optimization_flags

WARM = 8  # tokens that are generated before the clock starts


def options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    p.add_argument("--config", default="hymo_750m")
    p.add_argument("--contexts", type=int, nargs="+", default=[1024, 16_384, 131_072])
    p.add_argument("--tokens", type=int, default=64, help="generated after each prompt (default: 64)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    p.add_argument("--table", action="store_true", help="measure nothing: the table of what lies in --out")
    p.add_argument("--picture", type=Path, metavar="PNG", help="draw tokens a second and bytes by length")
    return p


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def cache_bytes(cache: Cache) -> dict[str, int]:
    """Bytes of the recurrent layers' states, and of the attention layers' latents."""
    found = {"recurrent": 0, "attention": 0}
    for state in cache.layers:
        kind = "recurrent" if isinstance(state, GDNState) else "attention"
        found[kind] += sum(part.numel() * part.element_size() for part in state)
    return found


@torch.no_grad()
def measure(model: HyMo, context: int, n_tokens: int, device: torch.device) -> dict[str, Any]:
    """One length: the prompt read, then ``n_tokens`` generated."""
    generator = torch.Generator().manual_seed(context)
    prompt_BT = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(device)
    for _ in range(2):
        cache = model.init_cache(1, context + WARM + n_tokens)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        synchronize(device)
        began = time.perf_counter()
        logits_BV = model.prefill(prompt_BT, cache)
        synchronize(device)
        prefill_s = time.perf_counter() - began
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    else:  # of the whole process so far
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for i in range(WARM + n_tokens):
        if i == WARM:
            synchronize(device)
            began = time.perf_counter()
        logits_BV = model.decode(logits_BV.argmax(-1), cache)
    synchronize(device)
    decode_s = time.perf_counter() - began
    return {
        "context": context,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": context / prefill_s,
        "prefill_peak": peak,
        "tokens_per_s": n_tokens / decode_s,
        "cache": cache_bytes(cache),
    }


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(args.config, overrides)
    device = pick_device(config.training.device)
    model = build_hymo(config, device="meta").to(getattr(torch, args.dtype)).to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    for (
        name,
        parameter,
    ) in model.named_parameters():  # `initialize_` draws on the host, which takes longer than the rest
        parameter.data.normal_(0, 0.02, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data.add_(1)
    for buffer in model.buffers():
        buffer.zero_()
    thread_optimization_flags(model.eval(), config.training.model_copy(update={"torch_compile_gdn": False}), device)
    report: dict[str, Any] = {
        "config": args.config, "options": overrides, "dtype": args.dtype, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "rows": [],
    }  # fmt: skip
    for context in args.contexts:
        report["rows"].append(measure(model, context, args.tokens, device))
        write(args.out / "generation.json", report)
        print(line(report["rows"][-1]), flush=True)


HEAD = (
    f"{'context':>9s} {'prefill s':>10s} {'tokens/s':>10s} {'peak':>9s} {'decode tokens/s':>16s} "
    f"{'recurrent cache':>16s} {'attention cache':>16s}"
)


def line(r: dict[str, Any]) -> str:
    cache = r["cache"]
    return (
        f"{r['context']:9,d} {r['prefill_s']:10.3f} {r['prefill_tokens_per_s']:10,.0f} {size(r['prefill_peak']):>9s} "
        f"{r['tokens_per_s']:16.1f} {size(cache['recurrent']):>16s} {size(cache['attention']):>16s}"
    )


def picture(report: dict[str, Any], target: Path) -> None:
    """Tokens a second, and bytes of the cache, by length of the context."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    rows = report["rows"]
    contexts = [r["context"] for r in rows]
    look = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(look):
        figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained", facecolor="white")
        speed.plot(contexts, [r["tokens_per_s"] for r in rows], "o-", color="#0072b2", lw=2)
        speed.set_ylim(0, 1.1 * max(r["tokens_per_s"] for r in rows))
        speed.set_title("tokens a second, one text", loc="left", fontsize=11)
        for kind, colour, dash in (("recurrent", "#0072b2", "o-"), ("attention", "#d55e00", "s--")):
            values = [r["cache"][kind] for r in rows]
            memory.plot(contexts, values, dash, color=colour, lw=2, label=f"{kind} layers")
        memory.set_yscale("log", base=2)
        memory.yaxis.set_major_locator(LogLocator(base=16))
        memory.yaxis.set_major_formatter(lambda value, _: size(value))
        memory.set_title("memory of the cache", loc="left", fontsize=11)
        memory.legend(frameon=False)
        for axes in (speed, memory):
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in contexts])
            axes.set_xlabel("tokens of context")
            axes.grid(alpha=0.25)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        pyplot.close(figure)


def main() -> None:
    args, overrides = parse(options())
    if not args.table:
        print(HEAD)
        run(args, overrides)
    report = json.loads((args.out / "generation.json").read_text())
    print(f"\n{report['config']}, {report['dtype']}, {report['device']}, torch {report['torch']}\n{HEAD}")
    for row in report["rows"]:
        print(line(row))
    if args.picture:
        picture(report, args.picture)
        print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
